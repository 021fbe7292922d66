#!/usr/bin/env bash
# Everything that needs a GPU, in two calls of six minutes each: both, and two starts of a machine, fit
# where a rented card is held for 15 minutes. The first is of what nothing but a GPU can show.
#
#   benchmarks/gpu/run.sh faults overhead actions device-ledger    what is said of a GPU's faults, and what it costs
#   benchmarks/gpu/run.sh                                          the kernels: what is right, then the table
#   TOTAL_S=90 benchmarks/gpu/run.sh device-tests tune             in what is left
#   benchmarks/gpu/run.sh tests optimizers                            only these parts
#   DRY_RUN=1 benchmarks/gpu/run.sh                                   every part, on a CPU: nothing is timed
#
# Writes six files at most per call into $OUT (default ./out), as soon as there is something to write:
# summary.md has a line per part, log.txt all that the parts printed. A part that fails, hangs or runs out of
# time costs no other. Exit code 0 only if every part ran and none failed. Nothing is written elsewhere; two
# calls need two folders, or the second's summary takes the place of the first's. TOTAL_S is how many seconds a
# call may take: whoever ends it from outside at another time should say so, else the last part has no line.
#
# PYTHON names the interpreter. Wheels and source packages in $WHEELS (default .wheels, which
# benchmarks/gpu/competitors.py fills) are unpacked for this run alone: those that import take part in the table.
# A relative path in these three starts where the script is called.
set -u -o pipefail
called_from=$PWD
cd "$(dirname "$0")/../.." || exit 1

absolute() { case $1 in /*) echo "$1" ;; *) echo "$called_from/$1" ;; esac; }

OUT=${OUT:+$(absolute "$OUT")}
OUT=${OUT:-$PWD/out}
WHEELS=${WHEELS:+$(absolute "$WHEELS")}
WHEELS=${WHEELS:-$PWD/.wheels}
PYTHON=${PYTHON:-python3}
case $PYTHON in */*) PYTHON=$(absolute "$PYTHON") ;; esac
DRY_RUN=${DRY_RUN:-}
SLOWER=${DRY_RUN:+12}  # an emulated device takes its time
SLOWER=${SLOWER:-1}
TOTAL_S=${TOTAL_S:-$((375 * SLOWER))}
KERNELS="environment check memcheck racecheck tests prepare optimizers end-to-end"
REST="faults overhead actions device-ledger device-tests tune"
WANTED=${*:-$KERNELS${DRY_RUN:+ $REST}}
for name in $WANTED; do
    case " $KERNELS $REST " in
        *" $name "*) ;;
        *) echo "run.sh: no part $name; there are: $KERNELS $REST" >&2; exit 2 ;;
    esac
done
SECONDS=0
SCRATCH=$(mktemp -d) || exit 1
mkdir "$SCRATCH/running"
trap 'rm -rf "$SCRATCH"' EXIT
trap 'for each in "$SCRATCH"/running/*; do kill -KILL -- "-${each##*/}" 2>/dev/null; done; exit 143' TERM INT
if ! mkdir -p "$OUT" || ! : >"$OUT/log.txt"; then
    OUT=$(mktemp -d) || exit 1
    echo "run.sh: what is found goes to $OUT instead" >&2
fi
LOG=$OUT/log.txt
SUMMARY=$OUT/summary.md
: >"$LOG"
printf '# On a GPU\n\n%s, commit %s\n\n| part | result | seconds | what |\n|---|---|--:|---|\n' \
    "$(date -u '+%Y-%m-%d %H:%M UTC')" "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" >"$SUMMARY"

# Caches of this run alone: the home may be read-only, and what is measured must not depend on what is there.
export XDG_CACHE_HOME=$SCRATCH/cache TORCHINDUCTOR_CACHE_DIR=$SCRATCH/inductor TRITON_CACHE_DIR=$SCRATCH/triton
export TORCH_EXTENSIONS_DIR=$SCRATCH/extensions HYPOTHESIS_STORAGE_DIRECTORY=$SCRATCH/hypothesis
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
beside=$("$PYTHON" -c 'import os, sys; print(os.path.dirname(sys.executable))' 2>>"$LOG")  # ninja may be there
export PATH=$PATH${beside:+:$beside}
source benchmarks/gpu/toolkit.sh
unset TORCH_CUDA_ARCH_LIST  # DeepSpeed knows no 9.0a; extensions are built for the card that is there
mkdir -p "$SCRATCH/site" "$SCRATCH/sources"
for package in "$WHEELS"/*.whl; do
    [ -e "$package" ] || continue
    "$PYTHON" -m zipfile -e "$package" "$SCRATCH/site" >>"$LOG" 2>&1 || echo "$package: not unpacked" >>"$LOG"
done
PYTHONPATH=$PYTHONPATH:$SCRATCH/site
for package in "$WHEELS"/*.tar.gz; do
    [ -e "$package" ] || continue
    tar -xzf "$package" -C "$SCRATCH/sources" >>"$LOG" 2>&1 || echo "$package: not unpacked" >>"$LOG"
done
for folder in "$SCRATCH"/sources/*/; do
    [ -d "$folder" ] && PYTHONPATH=$PYTHONPATH:${folder%/}
done

wanted() { case " $WANTED " in *" $1 "*) ;; *) return 1 ;; esac; }

# Writes the line of a part: name, result, seconds, what.
note() { printf '| %s | %s | %s | %s |\n' "$1" "$2" "$3" "$4" | tee -a "$SUMMARY"; }

# part NAME LIMIT_S COMMAND...: runs it within that time and what is left of all.
# It is skipped where it exits with 77, as it is in other test drivers. One that a broken driver will not let
# go is left behind, and so is a process that has detached itself but holds the part's output.
part() {
    local name=$1 limit=$(($2 * SLOWER)) begun=$SECONDS left=$((TOTAL_S - SECONDS)) heard=$SCRATCH/$1.log code pid last
    shift 2
    if ((left < 15)); then note "$name" skipped 0 "no time was left"; return; fi
    ((limit = limit < left ? limit : left))
    : >"$heard"
    timeout -k 8 "$limit" "$@" > >(exec >>"$LOG" 2>/dev/null; tee "$heard" | sed -u "s/^/[$name] /") 2>&1 &
    pid=$!
    : >"$SCRATCH/running/$pid"
    while kill -0 "$pid" 2>/dev/null && ((SECONDS - begun < limit + 10)); do sleep 0.2; done
    if kill -0 "$pid" 2>/dev/null; then code=137; else wait "$pid"; code=$?; fi
    kill -KILL -- "-$pid" 2>/dev/null  # what it started and `timeout`, whose group this is, did not end
    rm "$SCRATCH/running/$pid"
    sleep 0.3  # what it said last may be on its way
    last=$(grep -av '^ *$' "$heard" | tail -n 1 | cut -c 1-200 | tr '|' '/')
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

# sanitizer TOOL SEED: the kernels run once under it, each tensor in an allocation of its own, so that it sees
# where one ends. On an emulated device another order of its threads takes the sanitizer's place.
sanitizer() {
    if [ -n "$DRY_RUN" ]; then
        "$PYTHON" benchmarks/gpu/check.py --dry-run --seed "$2"
        return
    fi
    command -v compute-sanitizer >/dev/null || { echo "there is no compute-sanitizer here"; return 77; }
    sees_gpu || return 77
    # Calls that torch and cuBLAS try in vain, on purpose, are no errors; our own driver calls raise.
    local quiet=() code
    if [ "$1" = memcheck ]; then quiet=(--report-api-errors no); fi
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" ${quiet[@]+"${quiet[@]}"} \
        --target-processes all --error-exitcode 9 --print-limit 20 "$PYTHON" benchmarks/gpu/check.py \
        2>&1 | tee "$SCRATCH/$1.said"
    code=${PIPESTATUS[0]}
    if ((code)) && grep -qi 'device not supported' "$SCRATCH/$1.said"; then
        echo "compute-sanitizer does not support this machine's device"
        return 77
    fi
    return "$code"
}

# tests EACH_S METHOD PATH...: those of tests/gpu in these files, each for so long at most, ended by pytest-timeout
# in this way. Without a GPU they are rehearsed. With FILE_S in the environment all end after so many seconds.
tests() {
    local options=(-m gpu) each_s=$(($1 * SLOWER)) method=$2 limit=()
    shift 2
    if [ -n "$DRY_RUN" ]; then
        export KERNELS_ON_CPU=1
        options=()
    fi
    if "$PYTHON" -c 'import pytest_timeout' 2>/dev/null; then
        options+=(--timeout "$each_s" --timeout-method "$method")
    fi
    # In the foreground it stays in the part's group of processes, and ends with that.
    if [ -n "${FILE_S:-}" ]; then limit=(timeout --foreground -k 5 $((FILE_S * SLOWER))); fi
    ${limit[@]+"${limit[@]}"} "$PYTHON" -m pytest -v -v "$@" ${options[@]+"${options[@]}"} -p no:cacheprovider \
        --durations=5 -rfEs
}

# What the kernels do; what only a GPU shows comes first, if there should be no time for all.
kernel_tests() {
    local many=()
    [ -n "$DRY_RUN" ] || sees_gpu || return 77
    if [ -z "$DRY_RUN" ] && "$PYTHON" -c 'import xdist' 2>/dev/null; then many=(-n 8); fi  # they mostly compile
    # One that hangs costs its worker alone.
    tests 100 thread tests/gpu/test_gpu_streams.py tests/gpu/test_gpu_optimizers.py tests/gpu/test_gpu_bits.py \
        $([ -n "$DRY_RUN" ] || grep -l 'mark\.gpu$' tests/test_*.py) \
        ${many[@]+"${many[@]}"}
}

# What is read from the device: times are compared, so one after the other, and with nothing beside them. A signal
# ends a test that waits for a process. One that hangs in the driver hears none: it ends its file, and no other.
device_tests() {
    local each code said="" bad=0
    [ -n "$DRY_RUN" ] || sees_gpu || return 77
    for each in device_ledger readings deep_window checks; do
        FILE_S=45 tests 30 signal "tests/gpu/test_gpu_$each.py"
        code=$?
        case $code in
            0) said+="$each ok; " ;;
            124 | 137) said+="$each out of time; "; bad=1 ;;
            *) said+="$each failed; "; bad=1 ;;
        esac
    done
    echo "${said%; }"
    return "$bad"
}

# Only looks whether a GPU is there before it does what follows.
on_gpu() {
    if [ -n "$DRY_RUN" ]; then
        "$@" --dry-run
    else
        sees_gpu || return 77
        "$@"
    fi
}

tune() {
    [ -n "$DRY_RUN" ] || sees_gpu || return 77
    "$PYTHON" -m diagnose run --tune --run-dir "$SCRATCH/runs" --name gpu --json "$OUT/tune.json" \
        examples/gpt_text.py "$@" || return
    # Hooks that broke, or never were there: the script ran through all the same, and that is no good end.
    grep -oE '(measuring failed in|is not read any more|is not measured: this torch|[^"]* at installation)[^"]*' \
        "$OUT/tune.json"
    (($? == 1))
}

overhead() {
    local what=(--seconds 10 --step-ms 1 10 --device cuda)  # torch is imported five times besides
    if [ -n "$DRY_RUN" ]; then what=(--seconds 2 --step-ms 1); else sees_gpu || return 77; fi
    "$PYTHON" benchmarks/overhead_parts.py "${what[@]}" --starts 1 --markdown "$OUT/overhead.md"
}

export -f sees_gpu sanitizer tests kernel_tests device_tests on_gpu tune overhead
export PYTHON OUT SCRATCH DRY_RUN SLOWER

steps=150
tuned="--steps 3000 --width 256 --layers 6 --heads 8 --batch-size 32 --block-size 128"
if [ -n "$DRY_RUN" ]; then
    steps=4
    tuned="--steps 60"
fi
gpu=benchmarks/gpu

# These ask what is right, not how fast it is: they share the GPU. Meanwhile others' extensions and graphs compile.
together=()
wanted environment && { part environment 120 bash -c "on_gpu '$PYTHON' $gpu/environment.py --out '$OUT'" & together+=($!); }
wanted check && { part check 90 bash -c "on_gpu '$PYTHON' $gpu/check.py" & together+=($!); }
wanted tests && { part tests 130 bash -c kernel_tests & together+=($!); }
wanted prepare && { part prepare 130 bash -c "on_gpu '$PYTHON' $gpu/optimizers.py --prepare all --minutes $((2 * SLOWER))" & together+=($!); }
wanted memcheck && { part memcheck 130 bash -c 'sanitizer memcheck 1' & together+=($!); }
wanted racecheck && { part racecheck 130 bash -c 'sanitizer racecheck 2' & together+=($!); }
((${#together[@]})) && wait "${together[@]}"
# An extension whose compilation was cut off stays locked: whoever wants it would wait for ever.
find "$SCRATCH/extensions" -name lock -delete 2>/dev/null

# Whether the GPU was hot or held back is worth knowing where a time is worse than was predicted.
state_of_gpu() {
    command -v nvidia-smi >/dev/null || return 0
    timeout 10 nvidia-smi --query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_throttle_reasons.active \
        --format=csv 2>&1 | sed "s/^/[$1] /" >>"$LOG"
}

# What is timed runs alone. The table takes what the parts behind it do not need.
if wanted optimizers; then
    reserve=15
    wanted end-to-end && reserve=$((reserve + 60))
    wanted faults && reserve=$((reserve + 155))
    wanted device-tests && reserve=$((reserve + 90))
    wanted device-ledger && reserve=$((reserve + 70))
    wanted actions && reserve=$((reserve + 75))
    wanted overhead && reserve=$((reserve + 65))
    wanted tune && reserve=$((reserve + 60))
    room=$((TOTAL_S - SECONDS - reserve * SLOWER))
    if ((room < 60)); then room=60; fi
    minutes=$((room / 60)).$((room % 60 * 10 / 60))
    state_of_gpu "before optimizers"
    part optimizers $((room / SLOWER + 60)) \
        bash -c "on_gpu '$PYTHON' $gpu/optimizers.py --out '$OUT' --minutes $minutes"
    state_of_gpu "after optimizers"
fi
wanted faults && part faults 155 bash -c "on_gpu '$PYTHON' $gpu/faults.py --out '$OUT' --seconds 135"
wanted end-to-end && part end-to-end 75 bash -c "on_gpu '$PYTHON' $gpu/end_to_end.py --out '$OUT' --steps $steps"
wanted overhead && part overhead 65 bash -c overhead
wanted actions && part actions 75 bash -c "on_gpu '$PYTHON' $gpu/actions.py --out '$OUT' --seconds 70"
wanted device-ledger && part device-ledger 75 \
    bash -c "on_gpu '$PYTHON' $gpu/device_ledger.py --out '$OUT' --seconds $((60 * SLOWER))"
wanted device-tests && part device-tests 100 bash -c device_tests
wanted tune && part tune 60 bash -c "tune $tuned"

missed=0
for name in $WANTED; do
    grep -q "^| $name | ok |" "$SUMMARY" || missed=$((missed + 1))
done
echo "$SECONDS s; $missed of $(wc -w <<<"$WANTED") parts did not run to a good end; see $OUT" | tee -a "$LOG"
exit $((missed > 0))
