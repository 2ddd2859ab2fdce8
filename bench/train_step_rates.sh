#!/bin/sh
# bench/train_step.py between hosts of the lab, at several link rates: first without a limit, which
# the others are then compared with. Needs root, as the lab does.
#
#   bench/train_step_rates.sh RESULTS [OPTION OF train_step.py ...]
#
# With --start FOLDER, which the first job trains, the others begin with the same trained model.
# Writes RESULTS/none.json, RESULTS/500mbit.json, ..., and beside each what the lab counted on the
# links; then prints a table. RATES, HOSTS and PYTHON in the environment stand for
# "500mbit 1gbit 2gbit", 2 and python3. Two ranks on each host.
set -eu
[ $# -ge 1 ] || { echo "usage: $0 RESULTS [OPTION OF train_step.py ...]" >&2; exit 2; }
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
mkdir -p "$1"
results=$(cd "$1" && pwd)
shift
lab=train-step
trap '"$root/lab/down" --name "$lab"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
for rate in none ${RATES:-500mbit 1gbit 2gbit}; do
  "$root/lab/up" --name "$lab" --hosts "${HOSTS:-2}" --rate "$rate" >&2
  "$root/lab/run" --name "$lab" --ranks-per-host 2 --report "$results/$rate.lab.json" -- \
    "$python" -B "$root/bench/train_step.py" "$@" > "$results/$rate.part"
  mv "$results/$rate.part" "$results/$rate.json"
  "$root/lab/down" --name "$lab" >&2
  [ "$rate" != none ] || set -- "$@" --free "$results/none.json"
done
cd "$results"
for rate in none ${RATES:-500mbit 1gbit 2gbit}; do
  "$python" -B "$root/bench/train_step_table.py" "$rate.json"
done
