# The way to the server of a SkyPilot task, for a login on its machine: ssh MACHINE sh -c "$(cat reach.sh)" sh VARIABLE [take]
#
# VARIABLE is one that the task alone has in its environment, ART_CLOUD_NAME=mine. With `take` standard input is handed
# to the server that waits for its secrets. Each answer is a line: "in", "taken", and once the server listens its
# endpoint.json. What a server that is gone has left counts for nothing.
echo in
boot="$(cat /proc/sys/kernel/random/boot_id)"
while [ -d "/proc/$PPID" ]; do # until the login ends
  for environment in $(grep -lzxsF -e "$1" /proc/[0-9]*/environ); do
    process="${environment%/environ}"
    task="$(tr '\0' '\n' 2>/dev/null <"$environment")" # its HOME may be another than that of a login (Slurm)
    home="$(printf %s "$task" | sed -n 's/^HOME=//p')"
    state="$home/.art-cloud/clusters/$(printf %s "$task" | sed -n 's/^ART_CLOUD_NAME=//p')"
    if [ "$2" = take ] && [ -p "$state/secrets" ] && timeout 5 sh -c 'cat >"$0"' "$state/secrets"; then
      echo taken
      set -- "$1"
    fi
    started="$(sed 's/.*) //' "$process/stat" 2>/dev/null | cut -d' ' -f20)"
    if grep -qsF "\"$boot/${process#/proc/}/$started\"" "$state/endpoint.json"; then
      cat "$state/endpoint.json"
      exit
    fi
  done
  sleep 0.2
done
