#!/bin/bash
# Train on several machines over ssh: start the same launch on each machine, and end all of them together.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: clusters/ssh.sh HOSTFILE -- RECIPE [FLAGS OF THE RECIPE]

    clusters/ssh.sh hosts.txt -- recipes/nlp.py --output_dir /shared/run1

HOSTFILE names one machine per line, as for ssh (user@host, or a name in ~/.ssh/config), and nothing else; # starts a
comment. The repository must be in the same folder on all of them. ssh must not prompt: use a key without a passphrase,
or an agent.
On Ctrl-C, all machines save a checkpoint and end. When one fails, the others end. Environment variables:

    PROCESSES    processes per machine (default: one per GPU)
    MASTER_ADDR  address of the first machine for the others (default: its name in HOSTFILE)
    MASTER_PORT  a free port on the first machine (default: 29500)
    FOLDER       folder of the repository on all machines (default: the current folder)
    SSH          the command that connects to a machine (default: ssh, which notices a lost connection in 90 s)
    EXPORT       names of other variables to pass on, such as "NCCL_SOCKET_IFNAME HF_TOKEN"
TEXT
}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
if [ $# -lt 3 ] || [ "$2" != -- ]; then usage >&2; exit 2; fi
[ -r "$1" ] || { echo "error: $1 cannot be read: give a file with one machine per line" >&2; exit 2; }
mapfile -t machines < <(sed -e 's/#.*//' -e 's/^[[:space:]]*//' -e 's/[[:space:]]*$//' -e '/^$/d' "$1")
for machine in "${machines[@]}"; do
    if [[ $machine == *[[:space:]]* ]]; then
        echo "error: $1: '$machine': write only the name of the machine; PROCESSES=N sets its processes" >&2
        exit 2
    fi
done
[ ${#machines[@]} -gt 0 ] || { echo "error: $1 names no machine: write one machine per line" >&2; exit 2; }
shift 2
# Detects a launcher that starts fewer processes. With PROCESSES=gpu, the default, the total is unknown here.
case "${PROCESSES:-gpu} $1" in
    [0-9]*.py) set -- "$1" --expect_processes $((${#machines[@]} * PROCESSES)) "${@:2}" ;;
esac

settings="TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110 "  # seconds to save before torchrun kills
for name in ${EXPORT:-}; do settings+="$(printf '%q' "$name=${!name}") "; done

# All connections read from a pipe whose only writer is this script: however the script ends, each machine sees the end
# of its input. sshd sends no signal to its commands, so the remote script waits for that end and then sends SIGTERM.
pipe=$(mktemp -d)/open
mkfifo "$pipe"
exec 8<> "$pipe"
code=0
end_all() { exec 8>&-; }
trap 'code=143; end_all' INT TERM HUP
trap 'rm -r "${pipe%/*}"' EXIT

for rank in "${!machines[@]}"; do
    launch="torchrun --nnodes ${#machines[@]} --node-rank $rank --nproc-per-node ${PROCESSES:-gpu}"
    launch+=" --master-addr ${MASTER_ADDR:-${machines[0]#*@}} --master-port ${MASTER_PORT:-29500}"
    launch+=" --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 $(printf '%q ' "$@")"
    there="exec 3<&0
cd $(printf '%q' "${FOLDER:-$PWD}") || exit 2
export PATH=\"\$PWD/.venv/bin:\$PATH\" $settings
$launch < /dev/null 3<&- & launch=\$!
{ read -r _ <&3; kill -TERM \$launch; } & watch=\$!
wait \$launch; code=\$?
kill \$watch; exit \$code"
    # shellcheck disable=SC2086
    ${SSH:-ssh -o ServerAliveInterval=30} "${machines[$rank]}" "bash -c $(printf '%q' "$there")" < "$pipe" 8>&- &
done

running=${#machines[@]}
while [ "$running" -gt 0 ]; do
    wait -n && ended=0 || ended=$?
    [ "$ended" -gt 128 ] && [ "$code" -eq 143 ] && [ "$(jobs -rp | wc -l)" -eq "$running" ] && continue  # a trap
    running=$(jobs -rp | wc -l)
    if [ "$ended" -ne 0 ] && [ "$code" -eq 0 ]; then
        echo "clusters/ssh.sh: a machine ended with exit code $ended: ending all machines" >&2
        code=$ended
        end_all
    fi
done
exit "$code"
