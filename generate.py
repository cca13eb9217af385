"""Continues a prompt: python generate.py --workdir=runs/quickstart --prompt="The ".

What is not given is as in the run's configuration (`config.sample`).
"""

from absl import flags

from dpjax import command_line

flags.adopt_module_key_flags(command_line)
_WORKDIR = flags.DEFINE_string("workdir", None, "the run's folder", required=True)
_STEP = flags.DEFINE_integer("step", None, "of the checkpoint; the best by validation")
_PROMPT = flags.DEFINE_string("prompt", None, "the text to continue")
_LENGTH = flags.DEFINE_integer("length", None, "new tokens a sample")
_TEMPERATURE = flags.DEFINE_float("temperature", None, "0 is greedy")
_TOP_K = flags.DEFINE_integer("top_k", None, "draw from the k most likely; 0: all")
_TOP_P = flags.DEFINE_float("top_p", None, "draw from the most likely that reach it")
_SEED = flags.DEFINE_integer("seed", 0, "another seed, another text")
_NUM_SAMPLES = flags.DEFINE_integer("num_samples", 1, "how many continuations")


def main(_) -> None:
  """Prints the prompt and what follows, for each sample."""
  from dpjax import run as run_lib

  run = run_lib.load(_WORKDIR.value, _STEP.value)
  given = dict(
    prompt=_PROMPT.value,
    length=_LENGTH.value,
    temperature=_TEMPERATURE.value,
    top_k=_TOP_K.value,
    top_p=_TOP_P.value,
  )
  settings = {
    name: run.config.sample[name] if value is None else value
    for name, value in given.items()
  }
  prompt = settings.pop("prompt")
  samples = run.generate(
    prompt, seed=_SEED.value, num_samples=_NUM_SAMPLES.value, **settings
  )
  for number, text in enumerate(samples, 1):
    if len(samples) > 1:
      print(f"--- sample {number} ---")
    print(prompt + text)


if __name__ == "__main__":
  command_line.start(main)
