#!/usr/bin/env bash
# All that one GPU and ten minutes can show, in the order of what it decides; what is late is cut.
#
#   OUT=results bash benchmarks/gpu_day.sh CIFAR10
#
# CIFAR10 is a folder with train/<class>/* and test/<class>/*, or a tar archive of one. The machine needs neither a
# network nor pip nor git: `make wheels` on another one fills wheels/ with what vit needs beside torch, torchvision,
# timm and scikit-learn. $OUT then holds log.txt, whole, and the results as benchmarks/results has them.
#
#   DEVICE=cpu SMALL=1 OUT=results bash benchmarks/gpu_day.sh CIFAR10     a rehearsal
set -u
cd "$(dirname "$0")/.."
images=$1
out=${OUT:-benchmarks/results}
device=${DEVICE:-cuda}
all=${ALL_SECONDS:-580}
scratch=$(mktemp -d)
mkdir -p "$out" "$scratch/site" "$scratch/images" "$scratch/parts"

for wheel in wheels/*.whl; do
  [ -e "$wheel" ] && python3 -m zipfile -e "$wheel" "$scratch/site"
done
[ -e wheels/COMMIT ] && export VIT_COMMIT=$(cat wheels/COMMIT)
export PYTHONPATH=$PWD:$PWD/benchmarks:$scratch/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export VIT_CACHE=$scratch/cache TORCHINDUCTOR_CACHE_DIR=$scratch/compiled VIT_TEST_DEVICE=$device
unpacking=
[ -f "$images" ] && { tar xf "$images" -C "$scratch/images" & unpacking=$!; }

run=train.device=$device
steps= batch= modes= profile="--steps 20" seconds=6 factor=1
variants="resident resident-compiled engine engine-compiled"
if [ -n "${SMALL:-}" ]; then
  run="$run model.depth=1 model.embed_dim=32 model.num_heads=1 model.stem=patch train.epochs=2 train.batch_size=20
    train.compile=false schedule.warmup_epochs=0 data.validation_fraction=0.2"
  steps="train.batch_size=4 train.precision=float32 model.depth=1 model.embed_dim=32 model.num_heads=1 model.stem=patch"
  batch="--batch-size 2" modes="--modes blocks none" profile="--steps 1" seconds=0.2 variants="resident engine"
  # the commands are rehearsed, not their time
  factor=10 all=$((10 * all))
fi

# part NAME SECONDS COMMAND...: at most so long, and no longer than there is time
part() {
  name=$1 limit=$(($2 * factor))
  shift 2
  left=$((all - SECONDS))
  [ "$limit" -gt "$left" ] && limit=$left
  start=$SECONDS ended="no time left"
  if [ "$limit" -ge 5 ]; then
    timeout --kill-after 5 "$limit" "$@" > "$scratch/$name.txt" 2>&1
    code=$?
    ended="exit code $code"
    [ $code = 0 ] && ended=passed
    [ $code = 124 ] || [ $code = 137 ] && ended="out of time"
    { echo "===== $name: $ended, $((SECONDS - start)) s"; cat "$scratch/$name.txt"; } >> "$out/log.txt"
  fi
  echo "== $name: $ended, $((SECONDS - start)) s (at $SECONDS s)"
  tail -n 12 "$scratch/$name.txt" 2> /dev/null
  echo "{\"name\": \"$name\", \"ended\": \"$ended\", \"seconds\": $((SECONDS - start)), \"limit\": $limit}" \
    >> "$scratch/parts/parts.jsonl"
}
gpu() {  # gpu SCRIPT RESULT ...
  script=$1 result=$2
  shift 2
  set -- "$@" --device "$device" --output "$scratch/parts/$result.json"
  command=(python3 "benchmarks/gpu/$script.py" "$@")
}
accuracy() {  # accuracy SEEDS
  command=(python3 benchmarks/time_to_accuracy.py configs/cifar10/speedrun.yaml data.name=folder data.root="$root" $run
    train.evaluate_every_epochs=1000 --seeds "$1" --continue --without-mirrored --cache "$scratch/cache" --output "$out")
}

gpu sdpa_nan attention_nan; part attention_nan 45 "${command[@]}"
[ -n "$unpacking" ] && wait $unpacking && images=$scratch/images
root=$(dirname "$(find -L "$images" -maxdepth 3 -type d -name train | head -1)")
accuracy 1; part speedrun_cold 185 "${command[@]}"
gpu loop loop_24 "$root" 24 $profile $run; part loop_24 90 "${command[@]}"
gpu loop loop_32 "$root" 32 $profile $run --variants loop graph; part loop_32 60 "${command[@]}"
accuracy 2; part speedrun_warm 110 "${command[@]}"
gpu attention attention_times $profile $batch; part attention_times 40 "${command[@]}"
part tests 60 python3 -m pytest -q -p no:cacheprovider tests/cuda/test_data.py tests/cuda/test_recipes.py \
  tests/cuda/test_training.py -k "batches or recipe or backward or captured"
gpu compiling compiling $profile $steps $modes; part compiling 90 "${command[@]}"
part throughput 110 python3 benchmarks/train_throughput.py "$root" --variants $variants \
  --rounds 1 --seconds $seconds --device "$device" --output "$out"

python3 benchmarks/gpu/collect.py "$scratch/parts" --device "$device" --output "$out"
rm -r "$scratch"
