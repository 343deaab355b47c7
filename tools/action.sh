#!/bin/sh
# What action.yml runs: check strategy files, then compare the plan of a program with that of an older commit.
#
# STRATEGIES  files to check, separated by spaces
# PROGRAM     file.py:function, or empty
# OPTIONS     options of `shardwright plan`
# BASE        the commit to compare with
#
# The file of the comparison, in Markdown, is written to GITHUB_OUTPUT as `comment`.
set -eu

# shellcheck disable=SC2086  # names and options are separated by spaces
if [ -n "${STRATEGIES:-}" ]; then shardwright check $STRATEGIES; fi
[ -n "${PROGRAM:-}" ] || exit 0
: "${BASE:?name the commit to compare with}"

work=$(mktemp -d)
trap 'git worktree remove --force "$work/base" 2>/dev/null || true' EXIT
# A workflow has only the newest commit, unless it asked for more.
git cat-file -e "$BASE^{commit}" 2>/dev/null || git fetch --quiet --depth=1 origin "$BASE"
git worktree add --quiet --detach "$work/base" "$BASE"

# shellcheck disable=SC2086
shardwright plan "$PROGRAM" ${OPTIONS:-} --json > "$work/after.json"
comment=${RUNNER_TEMP:-$work}/shardwright-comment.md
# shellcheck disable=SC2086
if (cd "$work/base/$(git rev-parse --show-prefix)" && shardwright plan "$PROGRAM" ${OPTIONS:-} --json) \
  > "$work/before.json" 2> "$work/error.txt"; then
  shardwright diff --plan "$work/before.json" --plan "$work/after.json" --markdown > "$comment"
else
  { echo "The base has no plan to compare with:"; echo; echo '```text'; cat "$work/error.txt"; echo '```'; } > "$comment"
fi
if [ -n "${GITHUB_OUTPUT:-}" ]; then echo "comment=$comment" >> "$GITHUB_OUTPUT"; else cat "$comment"; fi
