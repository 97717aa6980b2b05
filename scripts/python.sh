# Sourced by the scripts beside it: $PYTHON is the caller's, else the checkout's environment, else the first on PATH.
if [[ -n ${PYTHON-} ]]; then
  :
elif [[ -x .venv/bin/python ]]; then
  PYTHON=.venv/bin/python
else
  PYTHON=python3
fi
# a checkout is tested as it lies here, installed or not
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
