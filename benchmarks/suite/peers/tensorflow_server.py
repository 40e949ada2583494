"""A server of tf.data's service, as a process: prints its address, and ends with its standard input.

The arguments are "dispatcher", or "worker" and the dispatcher's address.
"""

import socket
import sys

import tensorflow as tf

if __name__ == "__main__":
    service = tf.data.experimental.service
    kind, *dispatcher = sys.argv[1:]
    if kind == "dispatcher":
        server = service.DispatchServer(service.DispatcherConfig(work_dir=None))
        address = server.target.removeprefix("grpc://")
    else:
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        address = f"localhost:{port}"
        server = service.WorkerServer(
            service.WorkerConfig(dispatcher_address=dispatcher[0], worker_address=address, port=port)
        )
    print(f"address {address}", flush=True)
    sys.stdin.read()
