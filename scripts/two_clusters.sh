#!/bin/bash
# Two islands on two machines (or clusters' login nodes) by ssh, each in a tmux session that outlives this terminal.
#
#   scripts/two_clusters.sh configs/run.yaml alice@a.example:diloco bob@b.example:/data/diloco tcp://10.8.0.1:29400
#
# Island 0 runs on the first machine, whose address must be the HOST of the rendezvous as the second machine sees it: a
# private network or VPN: without a key (docs/security.md) the traffic between islands is not encrypted. On each machine
# the folder after the colon holds the project with its .venv (`make install`) and the run file. Watch an island with
#
#   ssh -t alice@a.example tmux attach -t diloco-0       # leave it running with Ctrl-b d; Ctrl-C stops both islands
#
# and run the same command again to continue after a stop.

set -euo pipefail

if [ $# -lt 4 ]; then
    echo "usage: $0 RUN.yaml USER@HOST:FOLDER USER@HOST:FOLDER tcp://HOST:PORT [key=value ...]" >&2
    exit 2
fi
run_file=$1
places=("$2" "$3")
rendezvous=$4
shift 4

for island in 0 1; do
    host=${places[$island]%%:*}
    folder=${places[$island]#*:}
    folder=${folder#"~/"} # where ssh begins anyway, and no shell would expand it
    printf -v launch '%q ' .venv/bin/hf-diloco launch "$run_file" "$@" \
        --island "$island" --num-islands 2 --rendezvous "$rendezvous"
    # The session stays open after the end, so that the result can be read; under another name, so that the next starts.
    ended="tmux rename-session diloco-$island-ended-\$(date +%Y%m%d-%H%M%S)"
    printf -v session '%q ' \
        tmux new-session -d -s "diloco-$island" "cd $(printf %q "$folder") && $launch; $ended; exec bash"
    # shellcheck disable=SC2029  # expanded here on purpose: every word is quoted above
    ssh "$host" "$session"
    echo "island $island: ssh -t $host tmux attach -t diloco-$island"
done
