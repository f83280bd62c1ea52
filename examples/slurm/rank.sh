# One rank, as srun starts it: Slurm's variables as torch.distributed names them, then the command.
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
echo "== $(date '+%F %T') rank $RANK of $WORLD_SIZE, node $SLURMD_NODENAME, start $((${SLURM_RESTART_COUNT:-0} + 1))"

# Megatron saves and ends on TERM. Sent through Slurm, TERM would also start the countdown to a KILL, so near the time
# limit launch.sh sends USR1, which every process of the step gets: the rank ignores it, and is sent TERM from here.
(
    trap '' USR1
    exec "$@"
) &
rank=$!
trap 'kill -TERM $rank' USR1
trap : TERM
while true; do # a trap ends a wait
    wait "$rank" && status=0 || status=$?
    kill -0 "$rank" 2>/dev/null || break
done
exit "$status"
