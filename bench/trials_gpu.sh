# All that is unconfirmed on a GPU in one call: checks, races, every trial alone and the best together
# (bench/trials_gpu.py), then the small models and, where there are two GPUs, TP 2 with what was kept.
#
#   OUT=folder bash bench/trials_gpu.sh [seconds, 560]     from the root of a checkout
#
# About: checks and races 70 s, trials 130 s, small models 90 s, TP 2 90 s, tune 60 s. Each part has
# a time-out of its own and leaves its results; all.tgz holds them. Nothing else may use the GPU.
BEGAN=$(date +%s); TOTAL=${1:-560}; O=$(mktemp -d); B=bench; : "${OUT:?}"
export OMP_NUM_THREADS=2 PYTHONUNBUFFERED=1 DEEPDRAFT_NATIVE=all
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
left() { echo $(( TOTAL - 10 - $(date +%s) + BEGAN )); }
pack() { tar czf "$OUT/all.tgz" -C "$O" .; }
run() { python3 -W ignore "$@"; }
GPUS=$(python3 -c 'import torch; print(torch.cuda.device_count())')
trap pack EXIT

# ---- checks and races, side by side ----
pids=
module() {  # of tests/kernels, in so many shards
  for i in $(seq 0 $(( $2 - 1 ))); do
    run $B/kernel_worker.py check --module "$1" --shard "$i/$2" > "$O/check-$1-$i.log" 2>&1 &
    pids="$pids $!"
  done
}
race() {  # name, tool, trials, module, test
  DEEPDRAFT_TRIALS=$3 timeout 75 compute-sanitizer --tool "$2" python3 -W ignore $B/kernel_worker.py check \
    --module "$4" --only "$5" > "$O/$1.log" 2>&1 &
  pids="$pids $!"
}
module test_native 4; module test_native_trials 5
for m in attend boundary route select; do module test_native_$m 1; done
SMALL="{'shape': (5, 3, 320, 96)"
race race-usual racecheck "" test_native "test_experts $SMALL"
race race-lanes racecheck lanes test_native "test_experts $SMALL"
race race-shared racecheck lanes test_native_trials test_shared_expert_with_bulk
race race-joined racecheck "" test_native_attend "test_chunks_combined_where_the_last_one_is_made {'shape': (20,"
race mem-shared memcheck "" test_native_trials test_shared_expert_with_bulk
race mem-joined memcheck "" test_native_attend "test_chunks_combined_where_the_last_one_is_made {'shape': (20,"
( sleep 80; for p in $pids; do kill "$p" 2> /dev/null; done ) & watch=$!
wait $pids; kill $watch 2> /dev/null
grep -h '"error"' "$O"/check-*.log | cut -c1-400
echo "checks passed: $(cat "$O"/check-*.log | grep -c '"passed": true'), at $(( $(date +%s) - BEGAN )) s"
tail -qn 1 "$O"/race-*.log "$O"/mem-*.log; pack

# ---- every form alone, the best together, the whole step ----
sound() {  # every test of a module ran and held
  ! grep -qs '"error"' "$O"/check-"$1"-*.log && [ -z "$(grep -L '"finished"' "$O"/check-"$1"-*.log)" ]
}
FORMS=bulk,even,cyclic,ahead
sound test_native_trials && FORMS=$FORMS,shared,shared+early || echo "not tried: shared"
sound test_native_attend && FORMS=$FORMS,joined || echo "not tried: joined"
FORMS=$FORMS,query
s=$(left); [ "$s" -gt 170 ] && s=170
timeout -k 5 "$s" python3 -W ignore $B/trials_gpu.py --json "$O/trials.json" --try "$FORMS" --seconds $(( s - 5 )) \
  > "$O/trials.log" 2>&1
grep -h '^-- ' "$O/trials.log" | cut -c1-260; pack
DEEPDRAFT_TRIALS=$(python3 -c 'import json, sys; print(",".join(json.load(open(sys.argv[1])).get("kept", [])))' "$O/trials.json")
export DEEPDRAFT_TRIALS; echo "kept: $DEEPDRAFT_TRIALS, at $(( $(date +%s) - BEGAN )) s"

# ---- small models: rows, drafted = plain ----
s=$(left); [ "$s" -gt 110 ] && s=110
[ "$s" -gt 40 ] && timeout -k 5 "$s" python3 -W ignore $B/step_gpu.py --json "$O/step.json" --seconds $(( s - 5 )) \
  --only golden,demo --prompts 20 > "$O/step.log" 2>&1 && cut -c1-260 "$O/step.log" | tail -25
pack

# ---- two GPUs ----
s=$(left); [ "$s" -gt 110 ] && s=110
if [ "$GPUS" -ge 2 ] && [ "$s" -gt 45 ]; then
  timeout -k 5 "$s" python3 -W ignore $B/tp2_step_gpu.py --json "$O/tp2.json" --seconds $(( s - 6 )) --parts equal,whole > "$O/tp2.log" 2>&1
  tail -25 "$O/tp2.log" | cut -c1-230; pack
fi

# ---- plans of the small slices and with bulk copies, while there is time ----
s=$(left)
[ "$s" -gt 50 ] && timeout -k 5 "$s" python3 -W ignore $B/native_gpu.py tune --slices --json "$O/tune.json" --seconds $(( s - 8 )) \
  > "$O/tune.log" 2>&1; tail -40 "$O/tune.log" 2> /dev/null
