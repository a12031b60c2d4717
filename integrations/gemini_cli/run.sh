#!/bin/sh
# Asks gemini-cli one question, in a home folder that has no settings of it yet.
set -eu
if [ ! -e "$HOME/.gemini/settings.json" ]; then
    mkdir -p "$HOME/.gemini"
    cp "$(dirname "$0")/settings.json" "$HOME/.gemini/settings.json"
fi
exec gemini --model policy --yolo --prompt "$1"
