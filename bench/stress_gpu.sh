# Kernel checks, products beside one another, the captured step again and again (bit for bit), times: one call.
#   OUT=folder bash bench/stress_gpu.sh [seconds, 210]   one GPU, two if they are there (TP 2: +75 s)
# Results: $OUT/all.tgz: stress.json ("clean", "replays"; per case logits_differ, state_differs, plain_differ),
# product.json, tp2.json, check-*.log
BEGAN=$(date +%s); TOTAL=${1:-210}; O=$(mktemp -d); B=bench; : "${OUT:?}"
export OMP_NUM_THREADS=2 PYTHONUNBUFFERED=1 DEEPDRAFT_NATIVE=all
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
pack() { tar czf "$OUT/all.tgz" -C "$O" .; }
trap pack EXIT
left() { echo $(( TOTAL - 6 - $(date +%s) + BEGAN )); }
GPUS=$(python3 -c 'import torch; print(torch.cuda.device_count())')
n=0
check() {  # module, only
  n=$(( n + 1 ))
  timeout 40 python3 -W ignore $B/kernel_worker.py check --module "$1" ${2:+--only "$2"} > "$O/check-$n-$1.log" 2>&1 &
}
check test_native_attend; check test_native_boundary; check test_native_route; check test_native_select
check test_native "'shape': (5, 3, 320, 96)"; check test_native "('fp8', 4096, 1280, 1)"; check test_native "('fp8', 36864, 1280, 1)"
check test_native test_bulk; check test_fused test_split_latents
timeout 44 python3 -W ignore $B/product_stress_gpu.py --json "$O/product.json" --seconds 40 --each 0.5 --beside > "$O/product.log" 2>&1 &
wait
grep -h '^-- ' "$O/product.log" | cut -c1-330; grep -h Error "$O/product.log" | head -3
grep -h '"error"' "$O"/check-*.log | cut -c1-300
echo "checks passed: $(cat "$O"/check-*.log | grep -c '"passed": true'), failed: $(cat "$O"/check-*.log | grep -c '"error"')"; pack
s=$(left); CUDA_VISIBLE_DEVICES=0 timeout -k 5 "$s" python3 -W ignore $B/stress_gpu.py --json "$O/stress.json" --seconds $(( s - 4 )) > "$O/stress.log" 2>&1
grep -h '^-- ' "$O/stress.log" | cut -c1-420; grep -h 'Error' "$O/stress.log" | head -5; pack
if [ "$GPUS" -ge 2 ]; then
  timeout -k 5 80 python3 -W ignore $B/tp2_step_gpu.py --json "$O/tp2.json" --seconds 75 --parts stress,whole --more brief --replays 150 > "$O/tp2.log" 2>&1
  tail -14 "$O/tp2.log" | cut -c1-200
fi
