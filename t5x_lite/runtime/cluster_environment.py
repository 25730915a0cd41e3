"""Environment variables that give a process its place in a cluster; apart from `cluster`, which imports JAX's users."""

# Host and port of process 0, number of processes, and index of this process.
ADDRESS, COUNT, INDEX = 'JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID'
# The devices of the machine that the process uses, separated by commas.
LOCAL_DEVICES = 'JAX_LOCAL_DEVICE_IDS'
# Id of the process of `t5x_lite launch` that has started this one.
LAUNCHED = 'T5X_LITE_LAUNCHED'
