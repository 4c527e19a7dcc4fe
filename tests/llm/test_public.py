import subprocess
import sys

import pytest

import hetero


def test_the_public_names_are_there_and_torch_waits_for_llm():
    code = "import hetero, sys; assert hetero.Sampling and 'torch' not in sys.modules; assert hetero.LLM.__name__ == 'LLM'; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert set(hetero.__all__) <= set(dir(hetero)) | {"LLM"}


def test_an_option_that_would_be_ignored_is_refused_before_anything_is_loaded():
    with pytest.raises(hetero.BadOption, match="overlap = off"):
        hetero.LLM(overlap=False)
