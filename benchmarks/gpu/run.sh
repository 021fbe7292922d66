#!/usr/bin/env bash
# Everything that needs a GPU, in one call of less than 9 minutes: the kernels, and the device's clock in short.
#
#   benchmarks/gpu/run.sh                       all parts
#   benchmarks/gpu/run.sh tests optimizers      only these
#   DRY_RUN=1 benchmarks/gpu/run.sh             on a CPU: that the parts start and write what they should
#
# Writes nine files at most into $OUT (default ./out), as soon as there is something to write: summary.md has a
# line per part, log.txt all that the parts printed. A part that fails or runs out of time costs no other.
# Exit code 0 only if every part ran and none failed.
#
# PYTHON names the interpreter. Wheels of other libraries in $WHEELS (default .wheels) are unpacked for this run
# alone, without their dependencies: bitsandbytes, torchao, flashoptim, timm take part in the table if they import.
set -u -o pipefail
cd "$(dirname "$0")/../.." || exit 1

OUT=${OUT:-out}
PYTHON=${PYTHON:-python3}
TOTAL_S=${TOTAL_S:-525}
DRY_RUN=${DRY_RUN:-}
mkdir -p "$OUT" || exit 1
OUT=$(cd "$OUT" && pwd)
LOG=$OUT/log.txt
SUMMARY=$OUT/summary.md
SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
export PATH=$PATH:/usr/local/cuda/bin PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
ALL="environment tests memcheck racecheck optimizers end-to-end device-ledger tune overhead"
WANTED=${*:-$ALL}
for name in $WANTED; do
    case " $ALL " in *" $name "*) ;; *) echo "run.sh: no part $name; there are: $ALL" >&2; exit 2 ;; esac
done
SECONDS=0
: >"$LOG"
printf '# The kernels on a GPU\n\n%s, commit %s\n\n| part | result | seconds | what |\n|---|---|--:|---|\n' \
    "$(date -u '+%Y-%m-%d %H:%M UTC')" "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" >"$SUMMARY"

if compgen -G "${WHEELS:-.wheels}/*.whl" >/dev/null; then
    for wheel in "${WHEELS:-.wheels}"/*.whl; do
        "$PYTHON" -m zipfile -e "$wheel" "$SCRATCH/site" >>"$LOG" 2>&1 || echo "$wheel: not unpacked" >>"$LOG"
    done
    PYTHONPATH=$PYTHONPATH:$SCRATCH/site
fi

wanted() { case " $WANTED " in *" $1 "*) ;; *) return 1 ;; esac; }

# Writes the line of a part: name, result, seconds, what.
note() { printf '| %s | %s | %s | %s |\n' "$1" "$2" "$3" "$4" | tee -a "$SUMMARY"; }

# part NAME LIMIT_S COMMAND...: runs it within that time and what is left of all.
# It is skipped where it exits with 77, as it is in other test drivers.
part() {
    local name=$1 limit=$2 begun=$SECONDS left=$((TOTAL_S - SECONDS)) code
    shift 2
    if ((left < 15)); then note "$name" skipped 0 "no time was left"; return; fi
    timeout -k 5 "$((limit < left ? limit : left))" "$@" 2>&1 | sed -u "s/^/[$name] /" >>"$LOG"
    code=${PIPESTATUS[0]}
    local last
    last=$(grep -aF "[$name] " "$LOG" | grep -av '^\[[a-z-]*\] *$' | tail -n 1 | cut -c "$((${#name} + 4))-200" | tr '|' '/')
    case $code in
        0) note "$name" ok $((SECONDS - begun)) "$last" ;;
        77) note "$name" skipped $((SECONDS - begun)) "$last" ;;
        124 | 137) note "$name" failed $((SECONDS - begun)) "out of time; last: $last" ;;
        *) note "$name" failed $((SECONDS - begun)) "exit code $code; $last" ;;
    esac
}

sees_gpu() {
    "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "torch sees no GPU"; return 1; }
}

# The kernels run once under a sanitizer, each tensor in an allocation of its own, so that it sees where one ends.
sanitizer() {
    command -v compute-sanitizer >/dev/null || { echo "there is no compute-sanitizer here"; return 77; }
    # Calls that torch and cuBLAS try in vain, on purpose, are no errors; our own driver calls raise.
    local quiet=()
    if [ "$1" = memcheck ]; then quiet=(--report-api-errors no); fi
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" ${quiet[@]+"${quiet[@]}"} \
        --target-processes all --error-exitcode 9 --print-limit 20 "$PYTHON" benchmarks/gpu/check.py
}

tests() {
    sees_gpu || return 77
    # What only a GPU shows comes first, if there should be no time for all.
    local many=()
    if "$PYTHON" -c 'import xdist' 2>/dev/null; then many=(-n 4); fi  # most of the time is compiling
    "$PYTHON" -m pytest ${many[@]+"${many[@]}"} -m gpu tests/gpu/test_gpu_streams.py tests/gpu/test_gpu_optimizers.py tests/gpu -p no:cacheprovider --durations=5 -rfEs
}

tune() {
    sees_gpu || [ -n "$DRY_RUN" ] || return 77
    "$PYTHON" -m diagnose run --tune --run-dir "$SCRATCH/runs" --name gpu --json "$OUT/tune.json" \
        examples/gpt_text.py "$@"
}

overhead() {
    "$PYTHON" benchmarks/overhead.py --rounds 1 --step-ms 10 --tools bare diagnose
}

export -f sees_gpu sanitizer tests tune overhead
export PYTHON OUT SCRATCH DRY_RUN

dry=()
steps=150
tuned="--steps 4000 --width 256 --layers 6 --heads 8 --batch-size 32 --block-size 128"
if [ -n "$DRY_RUN" ]; then
    dry=(--dry-run)
    steps=6
    tuned="--steps 60"
fi

wanted environment && part environment 60 "$PYTHON" benchmarks/gpu/environment.py --out "$OUT"

# These ask what is right, not how fast it is: they share the GPU.
wanted memcheck && part memcheck 130 bash -c 'sanitizer memcheck' &
wanted racecheck && part racecheck 130 bash -c 'sanitizer racecheck' &
wanted tests && part tests 140 bash -c tests &
wait

# The parts behind the table are kept this much time.
reserve=0
wanted end-to-end && reserve=$((reserve + 55))
wanted device-ledger && reserve=$((reserve + 90))
wanted tune && reserve=$((reserve + 65))
room=$((TOTAL_S - SECONDS - reserve - 15))
if ((room < 60)); then room=60; fi
if wanted optimizers; then
    minutes=$("$PYTHON" -c "print($room / 60)")
    part optimizers $((room + 60)) \
        "$PYTHON" benchmarks/gpu/optimizers.py --out "$OUT" --minutes "$minutes" ${dry[@]+"${dry[@]}"}
fi
wanted end-to-end && part end-to-end 70 \
    "$PYTHON" benchmarks/gpu/end_to_end.py --out "$OUT" --steps $steps ${dry[@]+"${dry[@]}"}
wanted device-ledger && part device-ledger 110 \
    "$PYTHON" benchmarks/gpu/device_ledger.py --out "$OUT" --rounds 1 --jobs text GPT ${dry[@]+"${dry[@]}"}
wanted tune && part tune 80 bash -c "tune $tuned"
wanted overhead && part overhead 120 bash -c overhead

missed=0
for name in $WANTED; do
    grep -q "^| $name | ok |" "$SUMMARY" || missed=$((missed + 1))
done
echo "$SECONDS s; $missed of $(wc -w <<<"$WANTED") parts did not run to a good end; see $OUT"
exit $((missed > 0))
