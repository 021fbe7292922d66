"""Callbacks for trainers, for those who cannot start their script with `diagnose run`.

    from diagnose.callbacks.huggingface import DiagnoseCallback
    from diagnose.callbacks.lightning import DiagnoseCallback

Each is imported on its own: neither library is needed for the other, nor by `diagnose`.
"""
