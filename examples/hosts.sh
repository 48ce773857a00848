#!/bin/bash
# Start a job by ssh, with one rank on each machine. In the folder of your program:
#
#   HOSTS="10.0.0.1 10.0.0.2" ./hosts.sh -m pipesgd.train --dataset digits --output runs/a
#
# HOSTS are addresses at which ssh asks for no password; the others reach the first one by its address, too. Each
# machine has the same folder, with the program, its data and .venv. Ctrl-C reaches all ranks, which write a checkpoint.
# The script exits with the code of the first machine that failed.
set -u
read -ra hosts <<< "${HOSTS:?must be the addresses of the machines, with spaces between them}"
: "${FOLDER:=$PWD}" "${PYTHON:=.venv/bin/python}" "${PORT:=29500}"

program=$(printf ' %q' "$@")
for name in GLOO_SOCKET_IFNAME OMP_NUM_THREADS RES_OPTIONS "${!PIPESGD_@}"; do # pass on what is set here
  [ -z "${!name:-}" ] || PYTHON="env $name=$(printf %q "${!name}") $PYTHON"
done

sessions=() inputs=()
for number in "${!hosts[@]}"; do
  # A terminal on the other machine (-tt) turns the character that we send it on Ctrl-C into the signal.
  exec {input}> >(exec ssh -tt "${hosts[number]}" "cd $(printf %q "$FOLDER") && exec $PYTHON -m pipesgd.launch \
    --nnodes ${#hosts[@]} --node-rank $number --master-addr ${hosts[0]} --master-port $PORT$program")
  sessions+=($!) inputs+=("$input")
done
trap 'for input in "${inputs[@]}"; do printf "\003" >&"$input"; done 2> /dev/null' INT TERM

code=0
for session in "${sessions[@]}"; do
  while wait "$session"; ended=$?; kill -0 "$session" 2> /dev/null; do :; done # a signal interrupts the wait
  [ "$code" -ne 0 ] || code=$ended
done
exit "$code"
