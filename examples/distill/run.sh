#!/usr/bin/env bash
# Runs the stages of this example, one after another, in the repository's folder runs/: run.sh [warm-start|on-policy|dpo]...
# What a stage has made stays there, so a second call continues. The model of `make demo` is the teacher.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH="$PWD/.venv/bin:$PATH" # the environment of `make setup`, if there is one
here=examples/distill teacher=runs/search_agent-seed0/final port=${PORT:-8900}

train() { # train CONFIG RUN SETTING...: unless the run has ended
    [ -d "runs/$2-seed0/final" ] || areal-agents train "$here/$1" "${@:3}"
}
evaluate() { # evaluate NAME MODEL: greedily on the held-out tasks, and compare with the model before
    areal-agents eval "$here/config.yaml" --model "$2" --out "runs/distill-eval-$1"
    [ "$1" = start ] || areal-agents eval compare runs/distill-eval-start "runs/distill-eval-$1"
}

collect_from_teacher() ( # in a subshell, whose end is that of the server; any server with chat completions will do
    areal-agents serve --model "$teacher" --split eval --port "$port" --store runs/distill-teacher.db > runs/distill-teacher.log 2>&1 &
    server=$!
    trap 'kill $server 2> /dev/null; wait $server || true' EXIT
    for _ in $(seq 120); do
        curl -sf "http://127.0.0.1:$port/ready" > /dev/null && break
        kill -0 "$server" 2> /dev/null || { cat runs/distill-teacher.log; exit 1; }
        sleep 1
    done
    areal-agents collect "$here/config.yaml" --endpoint "http://127.0.0.1:$port/v1" --model strong --tasks 512 --out runs/distill-demos
)

warm_start() {
    [ -f runs/distill-demos/results.json ] || collect_from_teacher
    [ -f runs/distill-demonstrations.db ] || areal-agents episodes import runs/distill-demos \
        --into runs/distill-demonstrations.db --config "$here/config.yaml" --min-reward 1
    train sft.yaml distill-sft
    evaluate sft runs/distill-sft-seed0@final
    train config.yaml distill model=runs/distill-sft-seed0/final
    evaluate rl runs/distill-seed0@final
}
on_policy() {
    train on_policy.yaml distill-on-policy
    evaluate on-policy runs/distill-on-policy-seed0@final
}
dpo() {
    areal-agents collect "$here/config.yaml" --tasks 64 -k 8 --out runs/distill-groups
    train dpo.yaml distill-dpo
    evaluate dpo runs/distill-dpo-seed0@final
}

[ -d "$teacher" ] || { echo "there is no $teacher yet: make demo trains it, in under ten minutes"; exit 1; }
evaluate start examples/search_agent/model
for stage in "${@:-warm-start on-policy dpo}"; do
    for name in $stage; do
        case "$name" in
        warm-start) warm_start ;;
        on-policy) on_policy ;;
        dpo) dpo ;;
        *) echo "stages are warm-start, on-policy and dpo, got $name"; exit 2 ;;
        esac
    done
done
