"""Makes a small GIF of a film that play.py has made: results/film.gif, its first four seconds.

./run.sh train ppo_mujoco_torchcompile --compile --env-id Walker2d-v5 --total-timesteps 3000000
./run.sh play runs/.../policy.pt2 --video --env-kwargs '{"camera_name": "track"}'
python benchmark/film.py runs/.../videos/seed1-episode-0.mp4
"""

from dataclasses import dataclass
from pathlib import Path

import imageio.v3 as iio
import tyro
from results import RESULTS


@dataclass
class Args:
    film: tyro.conf.Positional[Path]  # an mp4 with 125 frames a second
    out: Path = RESULTS / "film.gif"  # where the GIF goes


def main(args: Args):
    frames = iio.imread(args.film, plugin="FFMPEG")[:500:10, ::2, ::2]
    iio.imwrite(args.out, frames, duration=80, loop=0)  # milliseconds a frame, as in the film


if __name__ == "__main__":
    main(tyro.cli(Args))
