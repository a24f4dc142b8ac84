#!/bin/sh
# Makes what the compose file needs, once: passwords (.env), keys and certificates (secrets/), folders (data/). All of it
# belongs to the user who runs this, and every container runs as that user. What exists is left as it is.
set -eu
cd "$(dirname "$0")"
umask 077

if [ "$(id -u)" = 0 ]; then
    uid=10001 gid=10001   # root prepares for a user without a name: nothing runs as root
else
    uid=$(id -u) gid=$(id -g)
fi

mkdir -p secrets
for one in postgres seaweedfs nats prometheus grafana memory; do
    mkdir -p "data/$one"
done

random() { openssl rand -hex "$1"; }

if [ ! -e .env ]; then
    cat > .env <<END
TRELLIS_UID=$uid
TRELLIS_GID=$gid
POSTGRES_PASSWORD=$(random 24)
TRELLIS_DB_PASSWORD=$(random 24)
S3_ACCESS_KEY=$(random 10)
S3_SECRET_KEY=$(random 24)
NATS_PASSWORD=$(random 24)
GRAFANA_PASSWORD=$(random 12)
END
fi
. ./.env

[ -e secrets/token.key ] || random 32 > secrets/token.key
[ -e secrets/callback.key ] || random 32 > secrets/callback.key
[ -e secrets/s3.json ] || cat > secrets/s3.json <<END
{"identities": [{"name": "trellis", "credentials": [{"accessKey": "$S3_ACCESS_KEY", "secretKey": "$S3_SECRET_KEY"}],
  "actions": ["Admin", "Read", "Write", "List"]}]}
END

# The safety kernel answers other machines over TLS only: a certificate authority of this fleet, and its certificate.
if [ ! -e secrets/kernel.pem ]; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj "/CN=trellis fleet" -keyout secrets/ca.key -out secrets/ca.pem \
        -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign" 2> /dev/null
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=safety-kernel" -keyout secrets/kernel.key -out secrets/kernel.csr 2> /dev/null
    printf 'subjectAltName=DNS:safety-kernel,DNS:localhost\nextendedKeyUsage=serverAuth\n' > secrets/kernel.ext
    openssl x509 -req -in secrets/kernel.csr -CA secrets/ca.pem -CAkey secrets/ca.key -CAcreateserial -days 825 \
        -extfile secrets/kernel.ext -out secrets/kernel.pem 2> /dev/null
    rm secrets/kernel.csr secrets/kernel.ext
fi

[ "$(id -u)" != 0 ] || chown -R "$TRELLIS_UID:$TRELLIS_GID" secrets data
echo "Ready for user $TRELLIS_UID: docker compose up --detach --wait"
