"""The gRPC process: `python -m server`, console script `rlt-server`.

__main__       options, signals, exit code
app            the life of the process: bind, load, serve, drain
service        rlt.v1.GenerationService on the event loop
streams        what one stream has to say and has not yet sent
engine_thread  the one thread that owns the engine
status         google.rpc statuses
"""
