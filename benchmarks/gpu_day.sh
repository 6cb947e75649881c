#!/usr/bin/env bash
# What one GPU and ten minutes can show, in the order of what it decides; what is late is cut.
#
#   OUT=results bash benchmarks/gpu_day.sh CIFAR10
#
# CIFAR10 is a folder with train/<class>/* and test/<class>/*, or a tar archive of one. The machine needs neither a
# network nor pip nor git: `make wheels` on another one fills wheels/. $OUT then holds log.txt and the result files.
#
#   DEVICE=cpu SMALL=1 OUT=results bash benchmarks/gpu_day.sh CIFAR10     a rehearsal
set -u
cd "$(dirname "$0")/.."
images=$1
out=${OUT:-benchmarks/results}
device=${DEVICE:-cuda}
all=${ALL_SECONDS:-580}
scratch=$(mktemp -d)
mkdir -p "$out" "$scratch/site" "$scratch/images"
for wheel in wheels/*.whl; do
  [ -e "$wheel" ] && python3 -m zipfile -e "$wheel" "$scratch/site"
done
[ -e wheels/COMMIT ] && export VIT_COMMIT=$(cat wheels/COMMIT)
export PYTHONPATH=$PWD:$PWD/benchmarks:$scratch/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export VIT_CACHE=$scratch/cache TORCHINDUCTOR_CACHE_DIR=$scratch/compiled VIT_TEST_DEVICE=$device
[ -f "$images" ] && tar xf "$images" -C "$scratch/images" && images=$scratch/images
root=$(dirname "$(find -L "$images" -maxdepth 3 -type d -name train | head -1)")

run=train.device=$device seconds=6
if [ -n "${SMALL:-}" ]; then
  run="$run model.depth=1 model.embed_dim=32 model.num_heads=1 model.stem=patch train.epochs=2 train.batch_size=20
    train.compile=false schedule.warmup_epochs=0 data.validation_fraction=0.2"
  seconds=0.2
fi

# part NAME SECONDS COMMAND...: at most so long, and no longer than there is time
part() {
  local name=$1 limit=$2 start=$SECONDS code
  shift 2
  [ "$limit" -gt $((all - SECONDS)) ] && limit=$((all - SECONDS))
  [ "$limit" -lt 5 ] && { echo "===== $name: no time left" | tee -a "$out/log.txt"; return; }
  timeout --kill-after 5 "$limit" "$@" > "$scratch/part.txt" 2>&1
  code=$?
  { echo "===== $name: exit code $code, $((SECONDS - start)) s"; cat "$scratch/part.txt"; } >> "$out/log.txt"
  echo "== $name: exit code $code, $((SECONDS - start)) s"
  tail -n 12 "$scratch/part.txt"
}

part attention 60 python3 benchmarks/gpu/sdpa_nan.py --device "$device" --output "$out"
part speedrun 290 python3 benchmarks/time_to_accuracy.py configs/cifar10/speedrun.yaml data.name=folder \
  data.root="$root" $run train.evaluate_every_epochs=1000 --seeds 2 --cache "$scratch/decoded" --output "$out"
part throughput 180 python3 benchmarks/train_throughput.py "$root" --variants resident engine \
  --rounds 1 --seconds "$seconds" --device "$device" --output "$out"
part tests 180 python3 -m pytest -q -p no:cacheprovider tests/cuda
rm -r "$scratch"
