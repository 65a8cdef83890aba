#!/bin/sh
# Read secrets from files, then become the command.
#
# NAME_FILE becomes NAME with what the file holds, for the names below, as in the image of
# PostgreSQL: secrets come by file and show in no compose file and no `docker inspect`.
# `healthy [URL]` asks a server or a worker whether it is well.
set -eu

if [ "${1:-}" = healthy ]; then
  exec python - "${2:-}" <<'PY'
import sys
import urllib.request

server, worker = "http://127.0.0.1:4200/api/ready", "http://127.0.0.1:8080/health"
for url in [sys.argv[1]] if sys.argv[1] else [server, worker]:
    try:
        with urllib.request.urlopen(url, timeout=4) as answer:
            sys.exit(answer.status != 200)
    except OSError as error:
        print(f"{url}: {error}")
sys.exit(1)
PY
fi

for name in PREFECT_API_AUTH_STRING PREFECT_SERVER_API_AUTH_STRING \
  PREFECT_SERVER_DATABASE_PASSWORD AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY HF_TOKEN WANDB_API_KEY \
  PACKHOUSE_NOTIFY
do
  eval "file=\${${name}_FILE:-}"
  [ -n "$file" ] || continue
  value=$(cat "$file") || exit 2
  case "$name:$value" in
    HF_TOKEN: | WANDB_API_KEY: | PACKHOUSE_NOTIFY:) ;; # an empty file: none is needed
    *:)
      echo "packhouse: '$file' (${name}_FILE) is empty; write the secret into it" >&2
      exit 2
      ;;
    *) export "$name=$value" ;;
  esac
  unset "${name}_FILE"
done
# A server that is killed may leave its lock on the leases of slots. The lock names the process that
# holds it, which in a container is always the same number: the next server would wait for itself.
case "$*" in
  "prefect server start"*) rm -f "${PREFECT_HOME:?}/concurrency_leases/expirations.lock" ;;
esac
exec "$@"
