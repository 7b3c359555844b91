# All forms of the CUDA C++ kernels that are unconfirmed on a GPU, in one call: checks, races, plans,
# every form alone and the best together (bench/trials_gpu.py), then TP 2 where there
# are two GPUs, then plans of slices.
#
#   OUT=folder bash bench/trials_gpu.sh [seconds, 300]     from the root of a checkout
#
# Each part has a time-out of its own and leaves its results; all.tgz holds them. Nothing else may use
# the GPU.
BEGAN=$(date +%s); TOTAL=${1:-300}; O=$(mktemp -d); B=bench; : "${OUT:?}"
export OMP_NUM_THREADS=2 PYTHONUNBUFFERED=1 DEEPDRAFT_NATIVE=all
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
left() { echo $(( TOTAL - 8 - $(date +%s) + BEGAN )); }
at() { echo "$(( $(date +%s) - BEGAN )) s"; }
pack() { tar czf "$OUT/all.tgz" -C "$O" .; }
GPUS=$(python3 -c 'import torch; print(torch.cuda.device_count())')
trap pack EXIT

# ---- checks and races, side by side ----
pids=
module() {  # of tests/kernels, in so many shards, with these forms
  for i in $(seq 0 $(( $2 - 1 ))); do
    DEEPDRAFT_TRIALS=$3 python3 -W ignore $B/kernel_worker.py check --module "$1" --shard "$i/$2" \
      > "$O/check-$1-${3//,/+}-$i.log" 2>&1 &
    pids="$pids $!"
  done
}
race() {  # name, tool, trials, module, test
  DEEPDRAFT_TRIALS=$3 timeout 60 compute-sanitizer --tool "$2" python3 -W ignore $B/kernel_worker.py check \
    --module "$4" --only "$5" > "$O/$1.log" 2>&1 &
  pids="$pids $!"
}
module test_native 6 ""; module test_native_attend 1 ""; module test_native_attend 1 combine
module test_native_boundary 1 ""; module test_native_route 1 ""
BULK=test_bulk_copies; ATTEND="test_chunks {'shape': (20,"
race race-usual racecheck "" test_native "$BULK"
race race-lanes racecheck lanes test_native "test_experts {'shape': (5, 3, 320, 96)"
race race-combine racecheck combine test_native_attend "$ATTEND"
race mem-usual memcheck "" test_native "$BULK"
race mem-combine memcheck combine test_native_attend "$ATTEND"
( sleep 65; for p in $pids; do kill "$p" 2> /dev/null; done ) & watch=$!
wait $pids; kill $watch 2> /dev/null
grep -h '"error"' "$O"/check-*.log | cut -c1-400
echo "checks passed: $(cat "$O"/check-*.log | grep -c '"passed": true'), at $(at)"
tail -qn 1 "$O"/race-*.log "$O"/mem-*.log; pack

# ---- plans ----
tune() {  # file, options
  s=$(left); [ "$s" -gt 45 ] && s=45
  [ "$s" -gt 15 ] && timeout -k 5 "$s" python3 -W ignore $B/native_gpu.py tune --bulk \
    --json "$O/$1.json" --seconds $(( s - 4 )) "${@:2}" > "$O/$1.log" 2>&1
  echo "$1 at $(at)"; pack
}
tune tune --slices 1

# ---- every form alone, the best together, the whole step ----
s=$(left); [ "$s" -gt 130 ] && s=130
timeout -k 5 "$s" python3 -W ignore $B/trials_gpu.py --json "$O/trials.json" \
  --seconds $(( s - 5 )) > "$O/trials.log" 2>&1
grep -h '^-- ' "$O/trials.log" | cut -c1-230; pack
KEPT=$(python3 -c 'import json, sys; print(",".join(n for n in json.load(open(sys.argv[1])).get("kept", [])))' "$O/trials.json")
echo "kept: $KEPT, at $(at)"

# ---- two GPUs ----
s=$(left); [ "$s" -gt 55 ] && s=55
if [ "$GPUS" -ge 2 ] && [ "$s" -gt 35 ]; then
  DEEPDRAFT_TRIALS=$KEPT timeout -k 5 "$s" python3 -W ignore $B/tp2_step_gpu.py --json "$O/tp2.json" \
    --seconds $(( s - 6 )) --parts whole > "$O/tp2.log" 2>&1
  tail -12 "$O/tp2.log" | cut -c1-200; pack
fi

# ---- slices ----
tune tune-slices --slices 2,8 --least 16000000
tail -60 "$O/tune.log"; tail -30 "$O/tune-slices.log"
