# Kernel checks, products alone, the captured step again and again (bit for bit), times: one call.
#   OUT=folder bash bench/stress_gpu.sh [seconds, 210]   one GPU, two if they are there (TP 2: +75 s)
# Results: $OUT/all.tgz: stress.json ("kept": fastest form without a difference; "replays"; per case
# logits_differ, state_differs), product.json, tp2.json, check-*.log
BEGAN=$(date +%s); TOTAL=${1:-210}; O=$(mktemp -d); B=bench; : "${OUT:?}"
export OMP_NUM_THREADS=2 PYTHONUNBUFFERED=1 DEEPDRAFT_NATIVE=all
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
pack() { tar czf "$OUT/all.tgz" -C "$O" .; }
trap pack EXIT
left() { echo $(( TOTAL - 6 - $(date +%s) + BEGAN )); }
GPUS=$(python3 -c 'import torch; print(torch.cuda.device_count())')
n=0
check() {  # module, trials, only
  n=$(( n + 1 ))
  DEEPDRAFT_TRIALS=$2 timeout 40 python3 -W ignore $B/kernel_worker.py check --module "$1" ${3:+--only "$3"} > "$O/check-$n-$1-${2//,/+}.log" 2>&1 &
}
check test_native_attend combine; check test_native_attend combine,voted; check test_native_boundary ""; check test_native_route ""
check test_native voted "'shape': (5, 3, 320, 96)"; check test_native voted "('fp8', 4096, 1280, 1)"; check test_native_select ""; check test_fused "" test_split_latents
timeout 48 python3 -W ignore $B/product_stress_gpu.py --json "$O/product.json" --seconds 44 --each 0.6 > "$O/product.log" 2>&1 &
wait
grep -h '^-- ' "$O/product.log" | cut -c1-330; grep -h Error "$O/product.log" | head -3
grep -h '"error"' "$O"/check-*.log | cut -c1-300
echo "checks passed: $(cat "$O"/check-*.log | grep -c '"passed": true'), failed: $(cat "$O"/check-*.log | grep -c '"passed": false')"; pack
s=$(left); CUDA_VISIBLE_DEVICES=0 timeout -k 5 "$s" python3 -W ignore $B/stress_gpu.py --json "$O/stress.json" --replays 300 --seconds $(( s - 4 )) > "$O/stress.log" 2>&1
grep -h '^-- ' "$O/stress.log" | cut -c1-420; grep -h 'Error' "$O/stress.log" | head -5; pack
KEPT=$(python3 -c 'import json, sys; k = json.load(open(sys.argv[1])).get("kept"); print("" if k is None else k.replace("+", ","))' "$O/stress.json")
echo "kept: $KEPT"
if [ "$GPUS" -ge 2 ]; then
  for f in "" "$KEPT"; do
    DEEPDRAFT_TRIALS=$f timeout -k 5 45 python3 -W ignore $B/tp2_step_gpu.py --json "$O/tp2-stress-${f:-usual}.json" --seconds 40 --parts stress --replays 150 > "$O/tp2-stress-${f:-usual}.log" 2>&1
    echo "TP2 stress, ${f:-usual}"; tail -7 "$O/tp2-stress-${f:-usual}.log" | cut -c1-200
    [ "$f" = "$KEPT" ] && break
  done
  DEEPDRAFT_TRIALS=$KEPT timeout -k 5 45 python3 -W ignore $B/tp2_step_gpu.py --json "$O/tp2.json" --seconds 40 --parts whole > "$O/tp2.log" 2>&1
  tail -8 "$O/tp2.log" | cut -c1-200; pack
fi
