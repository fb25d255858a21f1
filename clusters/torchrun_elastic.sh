#!/bin/sh
# Train on MIN to MAX machines. When a machine fails or joins, the group restarts at its new size from the last
# checkpoint. docs/elasticity.md states what is guaranteed.
set -eu

usage() {
    cat <<'TEXT'
usage: clusters/torchrun_elastic.sh MIN:MAX HOST:PORT RECIPE [FLAGS OF THE RECIPE]

Run the same command on every machine, in the same folder, with an --output_dir that all machines share:

    clusters/torchrun_elastic.sh 1:4 node1:29500 recipes/nlp.py --output_dir /shared/run1

HOST keeps the list of machines and must stay up; the others may join and leave. Environment variables:

    PROCESSES         processes on this machine (default: one per GPU)
    RUN_ID            name of the job; must differ between jobs with the same HOST:PORT (default: elastic)
    MAX_RESTARTS      maximum number of restarts of the group (default: 1000)
    LAST_CALL         seconds to wait for more machines after MIN have joined (default: 5)
    SHUTDOWN_TIMEOUT  seconds that a process has to save after a signal (default: 120)
    LOCAL_ADDR        address of this machine, if its name does not resolve to it
TEXT
}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
if [ $# -lt 3 ]; then usage >&2; exit 2; fi
nodes=$1 endpoint=$2 recipe=$3
shift 3

# In torch 2.13 the workers share the store of the rendezvous, and a machine that joins would end the whole job.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# torchrun recognizes HOST by the address to which its name resolves, which can belong to another network.
is_host=''
if [ "${endpoint%:*}" = "${LOCAL_ADDR:-}" ]; then is_host=',is_host=true'; fi
# By default torchrun kills a process that is still saving after 30 s. Every version of torchrun reads this variable.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${SHUTDOWN_TIMEOUT:-120}"

# Without --signals-to-handle, SIGUSR1 kills torchrun itself and does not reach the processes. last_call_timeout is 30 s
# by default: each restart of the group would wait that long without training.
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
