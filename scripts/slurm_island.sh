#!/bin/bash
# One island as one Slurm job, on one node or several. Submit it once on every cluster, each with its own island number:
#
#   export HF_DILOCO_NUM_ISLANDS=2 HF_DILOCO_RENDEZVOUS=tcp://login.cluster-a.example:29400
#   HF_DILOCO_ISLAND=0 sbatch --nodes 2 --gpus-per-node 8 scripts/slurm_island.sh configs/run.yaml        # on cluster a
#   HF_DILOCO_ISLAND=1 sbatch --nodes 1 --gpus-per-node 4 scripts/slurm_island.sh configs/run.yaml        # on cluster b
#
# HOST of the rendezvous must be island 0's first node (or forward the port to it), reachable from the other islands
# over a private network or VPN: the traffic between islands is not encrypted. Arguments after the run file are
# key=value settings. The same command continues a run that was stopped, preempted or ran out of time.
#
#SBATCH --job-name=hf-diloco
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --requeue

set -euo pipefail

run_file=${1:?usage: sbatch slurm_island.sh RUN.yaml [key=value ...]}
shift
: "${HF_DILOCO_ISLAND:?set HF_DILOCO_ISLAND to the number of this island, from 0}"
: "${HF_DILOCO_NUM_ISLANDS:?set HF_DILOCO_NUM_ISLANDS to the number of islands}"
: "${HF_DILOCO_RENDEZVOUS:?set HF_DILOCO_RENDEZVOUS to tcp://HOST:PORT, HOST being the machine of island 0}"

# The run folder, OUTPUT/NAME, as the run file and the arguments say.
island_folder=$(python - "$run_file" "$@" <<'PYTHON'
import sys
from hf_diloco.apps.lm.runfile import load_run_file
print(load_run_file(sys.argv[1], sys.argv[2:]).island_folder())
PYTHON
)
mkdir -p "$island_folder"

gpus_per_node=${SLURM_GPUS_ON_NODE:?this script needs GPUs: sbatch --gpus-per-node N}
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first_node=${nodes%%$'\n'*}
port=$((20000 + SLURM_JOB_ID % 20000))  # of the island's own world, another one for each job on a node

# Five minutes before the time limit Slurm sends USR1: finish the step, write a checkpoint, end.
trap 'was_interrupted=1; touch "$island_folder/stop"' USR1 TERM

# accelerate with DeepSpeed on every node; its settings stand here, not in anybody's default configuration file.
accelerate_config=$island_folder/accelerate.yaml
cat > "$accelerate_config" <<YAML
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {deepspeed_multinode_launcher: standard}
num_machines: $SLURM_NNODES
num_processes: $((SLURM_NNODES * gpus_per_node))
main_process_ip: $first_node
main_process_port: $port
rdzv_backend: static
same_network: true
YAML

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((SLURM_CPUS_PER_TASK / gpus_per_node))}
export TOKENIZERS_PARALLELISM=false

# $SLURM_NODEID is to be read on each node, not here.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 bash -c '
    exec accelerate launch --config_file "$0" --machine_rank "$SLURM_NODEID" -m hf_diloco.apps.lm "$@"
' "$accelerate_config" "$run_file" "$@" &
training=$!
was_interrupted=1
while ((was_interrupted)); do  # a trapped signal ends `wait` early, with a code of its own
    was_interrupted=0 code=0
    wait "$training" || code=$?
done
exit "$code"
