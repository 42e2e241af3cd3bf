"""Makes a small GIF of a film that play.py has made: results/film.gif, the first five seconds of it.

./run.sh train ppo_continuous_action_torchcompile --compile --env-id HalfCheetah-v4
./run.sh play runs/.../policy.pt2 --video --episodes 1
python benchmark/film.py runs/.../videos/seed1-episode-0.mp4
"""

from dataclasses import dataclass
from pathlib import Path

import imageio.v3 as iio
import tyro
from results import RESULTS


@dataclass
class Args:
    film: tyro.conf.Positional[Path]  # an mp4 with 20 frames a second
    out: Path = RESULTS / "film.gif"  # where the GIF goes


def main(args: Args):
    frames = iio.imread(args.film, plugin="FFMPEG")[:100:2, ::2, ::2]
    iio.imwrite(args.out, frames, duration=100, loop=0)  # milliseconds a frame


if __name__ == "__main__":
    main(tyro.cli(Args))
