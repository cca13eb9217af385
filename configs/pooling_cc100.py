"""Dynamic token pooling on English web pages (pooling paper, Table 1).

  python train.py --config=configs/pooling_cc100.py:unigram --workdir=runs/cc100_unigram
  python train.py --config=configs/pooling_cc100.py:whitespace,tiny --workdir=runs/tiny

After the colon: the options of configs/pooling_text8.py.

Downloads the beginning of the English part of cc-100 (268 MB of 82 GB) into data/ and
cleans it like text8: only letters a to z, space and line end, in lower case, digits spelt
out, runs of spaces collapsed. The first 400M characters are for training, the next 2M for
validation, and the next 2M for test. --config.data.path reads another text file or a folder
with {train,valid,test}.txt, which `python -m dpjax_papers.cleaning en` cleans in the same
way.

Model, training and reports are those of configs/pooling_text8.py.

Parameters:      41M, with a predictor 42M
Hardware, hours: the paper's two GeForce RTX 3080, 12 to 30 hours; ours not yet timed
Bits per character and shortening factor of the test split, from the paper (*: better than
none and fixed, p < 0.05 in a paired t-test over 3 seeds); ours not yet measured:

  none        1.225   1.0
  fixed2      1.224   2.0
  fixed3      1.229   3.0
  fixed4      1.240   4.0
  gumbel      1.212*  4.6
  entropy     1.218*  3.8
  unigram     1.212*  4.8
  whitespace  1.214*  5.2
"""

from configs import pooling_text8
from configs.pooling_text8 import Text


def get_config(variant: str = ""):
  return pooling_text8.configure(variant, {"": Text("cc100_en")})
