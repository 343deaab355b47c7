#!/bin/sh
# What action.yml runs: check strategy files, then compare the plan of a program with that of an
# older commit.
#
# STRATEGIES  files to check, separated by spaces
# PROGRAM     file.py:function, a path relative to the current folder; or empty
# OPTIONS     options of `shardwright plan`, separated by spaces
# BASE        the commit to compare with
#
# The file of the comparison, in Markdown, is written to GITHUB_OUTPUT as `comment`. Then the script
# fails if the plan of the current commit does, for instance because it does not fit.
set -euf

# shellcheck disable=SC2086  # names and options are separated by spaces; -f: they are no patterns
if [ -n "${STRATEGIES:-}" ]; then shardwright check $STRATEGIES; fi
[ -n "${PROGRAM:-}" ] || exit 0
: "${BASE:?name the commit to compare with}"
case $PROGRAM in /*) echo "PROGRAM is $PROGRAM: write a path inside the repository" >&2; exit 2 ;; esac

work=$(mktemp -d)
trap 'git worktree remove --force "$work/base" 2>/dev/null || true' EXIT
# A workflow has only the newest commit, unless it asked for more.
git cat-file -e "$BASE^{commit}" 2>/dev/null || git fetch --quiet --depth=1 origin "$BASE"
git worktree add --quiet --detach "$work/base" "$BASE"

# plan FILE: write the plan of the program in the current folder. Exit code 1 is a plan too: of a
# program that does not fit, or whose plan is incomplete.
plan() {
  code=0
  # shellcheck disable=SC2086
  shardwright plan "$PROGRAM" ${OPTIONS:-} --json > "$1" 2> "$work/error.txt" || code=$?
  [ "$code" -le 1 ] && [ -s "$1" ]
}

plan "$work/after.json" || { cat "$work/error.txt" >&2; exit "$((code ? code : 2))"; }
ended=$code
comment=${RUNNER_TEMP:-$work}/shardwright-comment.md
place=$(git rev-parse --show-prefix)
if (cd "$work/base/$place" 2> "$work/error.txt" && plan "$work/before.json"); then
  shardwright diff --plan "$work/before.json" --plan "$work/after.json" --markdown > "$comment"
else
  {
    printf 'The base has no plan to compare with:\n\n```text\n'
    cat "$work/error.txt"
    printf '```\n'
  } > "$comment"
fi
if [ -n "${GITHUB_OUTPUT:-}" ]; then
  echo "comment=$comment" >> "$GITHUB_OUTPUT"
else
  cat "$comment"
fi
if [ "$ended" != 0 ]; then
  echo "shardwright plan $PROGRAM ended with exit code $ended" >&2
fi
exit "$ended"
