#!/bin/sh
# Write fresh random secrets to docker/secrets/, for compose.yaml. Files that are there stay.
#
# The folder is closed to other users (0700). The files in it can be read by whoever can reach them
# (0444), for compose mounts each into containers whose users are not yours.
set -eu
cd "$(dirname "$0")"
umask 077
mkdir -p secrets
chmod 700 secrets

random() { od -An -N"$1" -tx1 /dev/urandom | tr -d ' \n'; }

put() { # NAME: write standard input to secrets/NAME, unless it is there
  if [ -e "secrets/$1" ]; then cat >/dev/null; return; fi
  cat >"secrets/$1"
  chmod 444 "secrets/$1"
  echo "wrote docker/secrets/$1"
}

key=PACKHOUSE$(random 6) secret=$(random 20)
if [ ! -e secrets/aws_credentials ] || [ ! -e secrets/s3_identities.json ]; then
  rm -f secrets/aws_credentials secrets/s3_identities.json # the two must agree
fi
printf 'admin:%s' "$(random 20)" | put prefect_auth_string
printf '%s' "$(random 20)" | put database_password
printf '[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n' "$key" "$secret" |
  put aws_credentials
printf '{"identities": [{"name": "packhouse", "credentials": [{"accessKey": "%s", "secretKey": "%s"}], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}\n' \
  "$key" "$secret" | put s3_identities.json
printf '%s' "${PACKHOUSE_NOTIFY:-}" | put notify # empty: nobody is told of failed runs
printf '%s' "${HF_TOKEN:-}" | put hf_token # empty: sources on the Hub need no account
