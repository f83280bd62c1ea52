# Sourced by the .sbatch files of this folder. What they set: MODEL, TRAINING, UPIPE, DATA (arrays of flags).
#
# From the environment, all optional:
#   UPIPE_VENV       folder of a virtual environment to activate on every node
#   UPIPE_CONTAINER  image for srun --container-image (pyxis/enroot); UPIPE_MOUNTS has what training reads, data and a
#                    checkout, as --container-mounts takes it; the run's folder and this one are mounted by themselves
#   UPIPE_SCRIPT     training script of a Megatron-LM checkout; without it the built-in GPT entry
#   UPIPE_LOAD       checkpoint to begin from (torch_dist; fsdp_dtensor for jobs with Megatron-FSDP); without it, and
#                    without one of an earlier start, weights are random
#   UPIPE_RUN_DIR    shared folder of checkpoints, logs and metrics (default: runs/<job name> where sbatch was called)
#   UPIPE_PREFLIGHT  "off" skips the checks before training
#   UPIPE_FIT        further flags of `megatron-upipe fit`, such as --gpu-memory 141; "off" leaves that check out
set -euo pipefail

RUN_DIR=${UPIPE_RUN_DIR:-$SLURM_SUBMIT_DIR/runs/$SLURM_JOB_NAME}
LOGS=$RUN_DIR/logs
RESTART=${SLURM_RESTART_COUNT:-0}
mkdir -p "$LOGS" "$RUN_DIR/checkpoints"
[[ -z ${UPIPE_VENV:-} ]] || source "$UPIPE_VENV/bin/activate"

say() { echo "$(date '+%F %T') $*"; }

CONTAINER=()
if [[ -n ${UPIPE_CONTAINER:-} ]]; then
    mounts=${UPIPE_MOUNTS:+$UPIPE_MOUNTS,}$RUN_DIR:$RUN_DIR,$HERE:$HERE
    CONTAINER=(--container-image="$UPIPE_CONTAINER" --container-mounts="$mounts")
fi
# Since Slurm 22.05 srun does not take this from sbatch.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}

# One process a GPU, started by srun itself: signals reach every rank, which torchrun would not pass on.
on_all_ranks() { # <name of the logs> <command...>
    local name=$1
    shift
    # --kill-on-bad-exit: without it the others wait for a lost rank until their timeouts
    srun --kill-on-bad-exit=1 --open-mode=append --output="$LOGS/$name-rank%t.log" "${CONTAINER[@]}" \
        bash "$HERE/rank.sh" "$@"
}

# To save and end (rank.sh).
tell_ranks() {
    local step
    step=$(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i | { grep -E '\.[0-9]+$' || true; } | tail -n 1)
    scancel --signal=USR1 "$step" || true # it may have ended by itself
}

set_environment() {
    # The first node's address as Slurm knows it; host names need not resolve inside containers.
    local first
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    MASTER_ADDR=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    # Two jobs on a node, and a job right after its requeue, must not meet at one port.
    MASTER_PORT=$((20000 + (SLURM_JOB_ID * 8 + RESTART) % 20000))
    export MASTER_ADDR MASTER_PORT
    # Megatron wants kernels and communication in one order with TP or CP, and the opposite with Megatron-FSDP, whose
    # gathers are to overlap.
    if [[ " ${UPIPE[*]} " == *" --use-megatron-fsdp "* ]]; then
        unset CUDA_DEVICE_MAX_CONNECTIONS
    else
        export CUDA_DEVICE_MAX_CONNECTIONS=1
    fi
    # Stages free and take tensors of many sizes; fixed segments would leave gigabytes reserved and unusable.
    export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
    export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-$PYTORCH_CUDA_ALLOC_CONF} # its name in newer torch
    # What every rank did last, if one hangs.
    export TORCH_NCCL_TRACE_BUFFER_SIZE=${TORCH_NCCL_TRACE_BUFFER_SIZE:-2000} TORCH_NCCL_DUMP_ON_TIMEOUT=1
    export TORCH_NCCL_DEBUG_INFO_TEMP_FILE=$LOGS/nccl_trace_rank_
    export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
    # Host threads do little here, and ranks would take each other's cores.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
    # For networks where NCCL or gloo choose a wrong interface: export NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME.
}

preflight() {
    [[ ${UPIPE_PREFLIGHT:-on} != off ]] || return 0
    local gpus_per_node=$((SLURM_NTASKS / SLURM_NNODES))
    if [[ ${UPIPE_FIT:-} != off ]]; then
        say "pre-flight 1 of 2: does it fit?"
        # shellcheck disable=SC2086
        srun --nodes=1 --ntasks=1 "${CONTAINER[@]}" python -m megatron_upipe.cli fit --gpus "$SLURM_NTASKS" \
            --gpus-per-node "$gpus_per_node" ${VOCABULARY:+--vocab-size "$VOCABULARY"} ${UPIPE_FIT:-} -- \
            "${MODEL[@]}" "${TRAINING[@]}" "${UPIPE[@]}" "${DATA[@]}" || {
            local status=$?
            if [[ $status == 1 ]]; then
                say "pre-flight failed: these flags do not fit; \`megatron-upipe plan\` finds some that do"
            else
                say "pre-flight failed: whether it fits could not be found out; UPIPE_FIT=off leaves this check out"
            fi
            exit "$status"
        }
    fi
    say "pre-flight 2 of 2: selftest on all ranks ($LOGS/selftest-rank0.log)"
    on_all_ranks selftest python -m megatron_upipe.cli selftest --mebibytes "${UPIPE_MEBIBYTES:-64}" || {
        say "pre-flight failed: see $LOGS/selftest-rank*.log"
        exit 1
    }
}

queue_again() {
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60 # until Slurm ends this script
    exit 0
}

# Trains, or goes on from the last checkpoint. On USR1 (#SBATCH --signal: the time limit is near) every rank saves and
# ends, and the job asks for its next turn. On TERM (requeue, preemption, scancel) they save too, if Slurm gives them
# KillWait seconds enough; what happens to the job then is Slurm's to say.
train() {
    local checkpoints=(--save "$RUN_DIR/checkpoints" --exit-signal-handler) script=()
    if [[ -e $RUN_DIR/checkpoints/latest_checkpointed_iteration.txt ]]; then
        checkpoints+=(--load "$RUN_DIR/checkpoints")
    elif [[ -n ${UPIPE_LOAD:-} ]]; then
        if [[ ! -e $UPIPE_LOAD/latest_checkpointed_iteration.txt ]]; then
            say "UPIPE_LOAD=$UPIPE_LOAD is no checkpoint: it has no latest_checkpointed_iteration.txt"
            exit 2
        fi
        checkpoints+=(--load "$UPIPE_LOAD" --finetune --exit-on-missing-checkpoint)
    else
        say "UPIPE_LOAD is not set: random weights"
    fi
    [[ -z ${UPIPE_SCRIPT:-} ]] || script=("$UPIPE_SCRIPT")
    local shown=$LOGS/train-rank$((SLURM_NTASKS - 1)).log
    touch "$shown"
    say "training, start $((RESTART + 1)): logs in $LOGS, checkpoints in $RUN_DIR/checkpoints"
    on_all_ranks train python -m megatron_upipe.run "${script[@]}" "${MODEL[@]}" "${TRAINING[@]}" "${UPIPE[@]}" \
        "${DATA[@]}" "${checkpoints[@]}" --upipe-metrics "$RUN_DIR/metrics.jsonl" &
    local step=$!
    tail -n 0 -F "$shown" 2>/dev/null | grep --line-buffered -E "iteration +[0-9]+/|validation loss|megatron_upipe: error" &
    local shows=$!
    trap 'trapped=1 again=1; say "time limit near: saving"; tell_ranks' USR1
    trap 'trapped=1; say "told to end: saving"' TERM # Slurm tells the ranks, too
    local status=0 found trapped=1
    while [[ $trapped == 1 ]]; do # a trap ends a wait; the next one has the status
        trapped=0
        wait "$step" && found=0 || found=$?
        [[ $found == 127 ]] || status=$found
    done
    trap - USR1 TERM
    sleep 1 # the last lines
    kill "$shows" 2>/dev/null || true
    if [[ $again == 1 && $status == 0 ]]; then
        say "saved; the job queues again"
        queue_again
    fi
    [[ $status == 0 ]] || grep -h "megatron_upipe: error" "$LOGS"/train-rank*.log | tail -n 1 || true
    say "training ended with status $status"
    exit "$status"
}

run() {
    again=0 # whether the time limit is near
    trap 'again=1' USR1
    set_environment
    # After a requeue the nodes may be others, so they are checked again; whether it fits is known.
    [[ $RESTART == 0 ]] || UPIPE_FIT=off
    preflight
    [[ $again == 0 ]] || queue_again
    train
}

# DATA from DATA_PATH (prefix of Megatron's .bin and .idx files) and TOKENIZER (a Hugging Face folder); mock data of
# <vocabulary> tokens if they are not set.
choose_data() { # <vocabulary>
    DATA=(--data-cache-path "$RUN_DIR/cache")
    if [[ -n ${DATA_PATH:-} ]]; then
        local paths
        read -r -a paths <<<"$DATA_PATH" # several with weights are a blend: 0.3 a 0.7 b
        DATA+=(--data-path "${paths[@]}" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "${TOKENIZER:?}")
    else
        say "DATA_PATH is not set: mock data"
        DATA+=(--mock-data --tokenizer-type NullTokenizer --vocab-size "$1")
    fi
    VOCABULARY=$1 # for the simulation, which asks no tokenizer
}
