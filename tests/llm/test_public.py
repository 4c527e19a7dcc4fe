import subprocess
import sys

import hetero


def test_the_public_names_are_there_and_torch_waits_for_llm():
    code = "import hetero, sys; assert hetero.Sampling and 'torch' not in sys.modules; assert hetero.LLM.__name__ == 'LLM'; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert set(hetero.__all__) <= set(dir(hetero)) | {"LLM"}
