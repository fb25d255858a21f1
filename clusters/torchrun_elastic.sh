#!/bin/sh
# Train on MIN to MAX machines: one that dies or joins restarts the group at its new size, from the last checkpoint.
# docs/elasticity.md says what is promised and what is not.
set -eu

usage() {
    cat <<'TEXT'
usage: clusters/torchrun_elastic.sh MIN:MAX HOST:PORT RECIPE [FLAGS OF THE RECIPE]

Run the same command on every machine, in the same folder, with an --output_dir that all of them see:

    clusters/torchrun_elastic.sh 1:4 node1:29500 recipes/nlp.py --output_dir /shared/run1

HOST is the machine that keeps the list of members; the others may come and go. In the environment:

    PROCESSES         processes on this machine (default: one for each of its GPUs)
    RUN_ID            tells this job from others that use the same HOST:PORT (default: elastic)
    MAX_RESTARTS      how often the group may be formed anew (default: 1000)
    LAST_CALL         seconds to wait for further machines once MIN are there (default: 5)
    SHUTDOWN_TIMEOUT  seconds that a signalled process has to save (default: 120)
    LOCAL_ADDR        address of this machine, where its name does not lead there
TEXT
}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
if [ $# -lt 3 ]; then usage >&2; exit 2; fi
nodes=$1 endpoint=$2 recipe=$3
shift 3

# torch 2.13 makes the workers share the store of the rendezvous, and then kills the whole job when a machine joins.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# torchrun finds out which machine is HOST by the address that its name leads to, which may be that of another network.
is_host=''
if [ "${endpoint%:*}" = "${LOCAL_ADDR:-}" ]; then is_host=',is_host=true'; fi
# torchrun kills a process that is still saving after 30 s; this is the variable that every version of it reads.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${SHUTDOWN_TIMEOUT:-120}"

# Without --signals-to-handle, SIGUSR1 kills torchrun itself, and the processes never hear of it. last_call_timeout is 30
# by default: half a minute in which nobody trains, each time the group is formed.
exec torchrun \
    --nnodes "$nodes" \
    --nproc-per-node "${PROCESSES:-gpu}" \
    --max-restarts "${MAX_RESTARTS:-1000}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$endpoint" \
    --rdzv-id "${RUN_ID:-elastic}" \
    --rdzv-conf "last_call_timeout=${LAST_CALL:-5},join_timeout=3600$is_host" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    ${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"} \
    "$recipe" --resume_from_checkpoint auto "$@"
