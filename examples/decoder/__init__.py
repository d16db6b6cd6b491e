"""A decoder of mixture-of-experts language models, as ``generate.py`` runs it and ``qlora_moe.py``
fine-tunes it.

``config`` reads config.json, ``weights`` and ``loading`` the tensors, ``tokens`` tokenizer.json.
``memory`` counts what they take.
``model`` is the transformer; its parts are ``attention`` (or ``latent_attention``), ``rotary``,
``experts`` and ``layers``. ``generation`` compiles it, and ``sampling`` chooses tokens.
``adapters``, ``training`` and ``peft`` are for fine-tuning.
"""
