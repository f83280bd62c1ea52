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
trap 'trapped=1; kill -TERM $rank' USR1
trap 'trapped=1' TERM
trapped=1
while [[ $trapped == 1 ]]; do # a trap ends a wait; the next one has the status
    trapped=0
    wait "$rank" && found=0 || found=$?
    [[ $found == 127 ]] || status=$found
done
exit "$status"
