"""Serves a checkpoint as an OpenAI server, and asks it: `python examples/serve.py [CHECKPOINT]`.

Needs `pip install 'transformers[serving]' openai`.
"""

import subprocess
import sys
import time

from openai import APIConnectionError, OpenAI

MODEL = sys.argv[1] if len(sys.argv) > 1 else "finetuned"
PORT = 8017

command = [sys.executable, "-m", "resformer", "serve", MODEL, "--host", "127.0.0.1", "--port", str(PORT)]
server = subprocess.Popen(command)
client = OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", timeout=120)
try:
    while server.poll() is None:
        try:
            answer = client.completions.create(model=MODEL, prompt="Values of the first layer", max_tokens=12)
        except APIConnectionError:  # it is starting
            time.sleep(1)
        else:
            print(answer.choices[0].text)
            break
finally:
    server.terminate()
    server.wait()
