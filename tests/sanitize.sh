#!/usr/bin/env bash
# Checks of the kernels under compute-sanitizer: out of bounds, races, wrong barriers, reads of memory that nobody wrote.
#
#   [MOE_BACKEND=cuda:0,1] tests/sanitize.sh [PROGRAM] [FILTER...]
#
# PROGRAM is the program `moe` [target/release/moe]; each FILTER is a part of names of groups of `moe check` (see there). Needs a GPU and the CUDA
# toolkit; takes some minutes. MOE_BACKEND says which GPUs [cuda: the first]. Fails when a tool finds anything, or when a check fails.
set -euo pipefail

program=${1:-target/release/moe}
backend=${MOE_BACKEND:-cuda}
shift || true
# One group of each form and of each mapping of rows to blocks; a group more of a type changes no access.
filters=("$@")
[ ${#filters[@]} -gt 0 ] || filters=(
    "gate gate bf16 bf16 fused" "gate gate_mul_add bf16 f32 framework" "gate gate_append_topk f16 f16 fused" "gate sigmoid_mul f32 f32 framework"
    "cast given scale, list, bf16 to e5m2fnuz" "cast given scale, grouped, f32 to bf16" "cast current scale, f16 to e5m2fnuz"
    "cast 1x128 scales, deepgemm power of two false, ColumnMajor of f32, bf16 to e5m2, grouped" "cast 1x32 scales, mx, RowMajor of e8m0, f16 to e5m2fnuz, grouped"
    "dispatch under a sanitizer, by token" "dispatch under a sanitizer, low latency" "dispatch under a sanitizer, by expert, quantised"
    "dispatch under a sanitizer, many tokens"
    "combine under a sanitizer, by token" "combine under a sanitizer, by expert, scaled" "combine under a sanitizer, by expert, at source"
)
# Ranks wait for each other longer than without a tool, and not for a kernel that is loaded. A GPU has so many queues for all processes: with 32 each the
# seventeenth context found no memory (measured, H200).
export CUDA_DEVICE_MAX_CONNECTIONS=4 CUDA_MODULE_LOADING=EAGER MOE_TIMEOUT_SCALE=${MOE_TIMEOUT_SCALE:-20}

sanitizer=$(command -v compute-sanitizer || true)
for folder in "${CUDA_HOME:-}" /usr/local/cuda; do
    [ -n "$sanitizer" ] || ! [ -x "$folder/bin/compute-sanitizer" ] || sanitizer=$folder/bin/compute-sanitizer
done
if [ -z "$sanitizer" ]; then
    printf 'error: compute-sanitizer is neither in PATH nor in CUDA_HOME or /usr/local/cuda\n' >&2
    exit 1
fi

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export program backend sanitizer logs

# Ranks are processes: as threads they share a context, and a call in which a tool waits for the context's work waits for a kernel that waits for a rank
# that this call holds up (measured: it ended at the bound of the wait in every second run).
arguments() {
    case $1 in
    *sanitizer*) printf '%s\0' --processes --ranks 2 --filter "$1" ;;
    *) printf '%s\0' --filter "$1" ;;
    esac
}
# Kernels are compiled before, by processes that no tool watches.
plain() {
    local options
    mapfile -d '' options < <(arguments "$1")
    "$program" check --backend "$backend" "${options[@]}" >"$logs/plain-$2" 2>&1 || { cat "$logs/plain-$2"; return 255; }
}
# Runs one tool over one filter. Other libraries' memory is not ours to judge: no check of leaks.
check() {
    local log="$logs/$1-$3" start=$SECONDS options
    mapfile -d '' options < <(arguments "$2")
    if "$sanitizer" --tool "$1" --target-processes all --error-exitcode 9 --print-limit 10 "$program" check --backend "$backend" "${options[@]}" >"$log" 2>&1; then
        printf '=== %s: clean, %d s: %s\n' "$1" $((SECONDS - start)) "$2"
    else
        cat "$log"
        printf '=== %s: FAILED at `%s`\n' "$1" "$2"
        return 1
    fi
}
export -f arguments plain check

# The tools do not disturb each other, so several run at once.
# Ranks wait for each other's slices of time on the GPU, and for those of other processes: they come first, three jobs at once and nothing else.
filter_jobs=() rank_jobs=() tool_jobs=()
for i in "${!filters[@]}"; do filter_jobs+=("${filters[$i]}" "$i"); done
for tool in racecheck initcheck memcheck synccheck; do
    for i in "${!filters[@]}"; do
        case ${filters[$i]} in
        *sanitizer*) rank_jobs+=("$tool" "${filters[$i]}" "$i") ;;
        *) tool_jobs+=("$tool" "${filters[$i]}" "$i") ;;
        esac
    done
done
run() { xargs -0 -r -n "$1" -P "$2" bash -c "$3 \"\$@\"" "$3"; }
printf '%s\0' "${filter_jobs[@]}" | run 2 6 plain
[ ${#rank_jobs[@]} = 0 ] || printf '%s\0' "${rank_jobs[@]}" | run 3 3 check
[ ${#tool_jobs[@]} = 0 ] || printf '%s\0' "${tool_jobs[@]}" | run 3 6 check
