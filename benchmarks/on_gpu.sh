#!/usr/bin/env bash
# Runs the measurements that need a GPU, the most important first: rows of the papers' tables at their
# own size, generation, training steps beside PyTorch's, operators and training steps beside the CPU.
#
#   benchmarks/on_gpu.sh prepare TEXTS FOLDER [SCALE]              on any machine
#   benchmarks/on_gpu.sh run FOLDER OUT MINUTES [SCALE] [PARTS]    on the machine with the GPU
#
# TEXTS is the --data of python -m reproduce, or empty. FOLDER receives tokens, and wheels of packages
# that may not be installed beside JAX and Flax, so that `run` needs no network. OUT receives a JSON
# file for each report, and log.txt. Rows that OUT or results/reproduce has are not trained again, so a
# second call continues; the variable ROWS names others. PARTS are some of tables,generation,steps,checks.
# SCALE is paper, or tiny to try everything on a CPU. Status 1: a part has failed, or rows did not fit.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
tables=dispatcher-table1,extractors-fig11
ptb=ptb/dispatcher,ptb/msa
# On an H200 a row takes about 2 minutes, one on WikiText-2 about 5.
rows=${ROWS:-$ptb,she_2,attention_32_2,he_2,we_2,wikitext2/dispatcher,wikitext2/msa,attention_1_2,me_2}
# In memory, if it has 16 GB: checkpoints are written after each of 60 epochs.
free=$(df --output=avail -k /dev/shm 2>/dev/null | tail -n 1)
work=$(mktemp -d -p "$( ((${free:-0} > 16000000)) && echo /dev/shm || echo "${TMPDIR:-/tmp}")")
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=$work/site:$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

prepare() {
  local texts=$1 folder=$2
  python3 -m reproduce "$tables" --rows="$rows" ${texts:+--data="$texts"} \
    --scale="${3:-paper}" --runs="$work/runs" --tokenize="$folder/tokens" &&
    python3 -m pip download -q --no-deps -d "$folder/wheels" \
      ml_collections tensorboard jaxtyping wadler_lindig &&
    du -sh "$folder"
}

# Runs a command of a part, for at most some seconds and no longer than is left.
part() {
  local name=$1 most=$2 begin=$SECONDS left=$((end - SECONDS))
  shift 2
  [[ ,$parts, == *,$name,* ]] || return 0
  echo "== $name: $left s left"
  ((left > 15)) || { failed+=" $name" && return; }
  timeout -k 10 "$((most < left ? most : left))" "$@" || failed+=" $name"
  echo "== $name: took $((SECONDS - begin)) s"
}

run() {
  local folder=$1 out=$2 scale=${4:-paper} parts=${5:-tables,generation,steps,checks}
  local failed="" quick=() checks=120 end known
  end=$(awk "BEGIN { print int($SECONDS + $3 * 60) }")
  [ "$scale" = tiny ] && quick=(--quick) checks=9999 # two cores compile for longer
  if compgen -G "$folder/wheels/*.whl" >/dev/null; then
    python3 -m pip install -q --no-index --no-deps --target "$work/site" "$folder"/wheels/*.whl
  fi
  for table in ${tables//,/ }; do
    cp -n "$root/results/reproduce/${table}_$scale.json" "$out" 2>/dev/null
  done
  nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null
  known=(python3 -m reproduce "$tables" --scale="$scale" --data="$folder/tokens" --out="$out"
    --runs="$work/runs" --minutes)
  minutes() { awk "BEGIN { print ($end - $SECONDS - 20) / 60 }"; }
  part tables 9999 "${known[@]}" "$(minutes)" --rows="$rows"
  part tables 9999 "${known[@]}" "$(minutes)" --rows="$ptb" --seeds=1,2
  part generation 9999 python3 "$root/benchmarks/generation.py" "${quick[@]}" --rounds=3 \
    --parts=models,pooling --out="$out/generation"
  part steps 9999 python3 "$root/benchmarks/step.py" "${quick[@]}" --rounds=3 --parts=pooling \
    --out="$out/step"
  part checks "$checks" python3 "$root/benchmarks/checks.py" --scale="$scale" --out="$out/checks.json"
  rm -f "$out"/*.md "$out"/*.png
  [ -z "$failed" ] || echo "without a result, or with rows left out:$failed"
  [ -z "$failed" ]
}

case "${1:-}:$#" in
  prepare:[34]) prepare "${@:2}" ;;
  run:[456])
    mkdir -p "$3"
    run "${@:2}" 2>&1 | tee -a "$3/log.txt"
    ;;
  *)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
