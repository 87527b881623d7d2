"""The examples that start a cluster: none of them can be run here, so what can be checked of their text is."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from nearpolicy.config import load_recipe
from nearpolicy.launch.explain_placement import rooms_of

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "cluster"
ALL = sorted(EXAMPLES.iterdir())


def parsed(name: str) -> dict[str, Any]:
    return YAML(typ="safe", pure=True).load(EXAMPLES / name)


def require_shell(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_there_is_one_for_each_way_to_a_cluster():
    assert [path.name for path in ALL] == ["kuberay.yaml", "ray_up.yaml", "skypilot.yaml", "slurm.sh"]


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_an_example_trains_a_recipe_that_exists_and_says_that_it_has_not_been_run(path):
    text = path.read_text()
    assert "Never run" in text
    recipes = set(re.findall(r"recipes/\w+\.yaml", text))
    assert recipes and all((ROOT / recipe).is_file() for recipe in recipes)
    [key] = set(re.findall(r"\bruntime\.\w+(?==)", text))
    assert key == "runtime.address"


def test_the_script_for_slurm_is_a_script_with_its_options_first():
    lines = (EXAMPLES / "slurm.sh").read_text().splitlines()
    require_shell("\n".join(lines))
    options = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    commands = [i for i, line in enumerate(lines) if line and not line.startswith("#")]
    assert options and options[-1] < commands[0]  # Slurm reads no further


def test_the_cluster_launcher_knows_every_key():
    import jsonschema
    import ray

    config = parsed("ray_up.yaml")
    schema = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
    jsonschema.validate(config, json.loads(schema.read_text()))
    for key in ("setup_commands", "head_start_ray_commands", "worker_start_ray_commands"):
        require_shell("\n".join(config[key]))
    node = config["available_node_types"][config["head_node_type"]]
    assert 1 + node["min_workers"] == 4


def test_the_cluster_of_kubernetes_has_room_for_the_recipe():
    job = parsed("kuberay.yaml")["spec"]
    require_shell(job["entrypoint"])
    cluster = job["rayClusterSpec"]
    [workers] = cluster["workerGroupSpecs"]
    pods = [(1, cluster["headGroupSpec"]["template"]), (workers["replicas"], workers["template"])]
    there = {"CPU": 0, "GPU": 0}
    for number, template in pods:
        [container] = template["spec"]["containers"]
        limits = container["resources"]["limits"]
        assert limits == container["resources"]["requests"]
        there["CPU"] += number * int(limits["cpu"])
        there["GPU"] += number * int(limits.get("nvidia.com/gpu", 0))
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        assert volumes == {"shm"} | {mount["name"] for mount in container["volumeMounts"]}
    needed = rooms_of(load_recipe(ROOT / "recipes" / "cluster_4nodes.yaml")).total
    assert all(there[name] >= amount for name, amount in needed.items())
    assert there["GPU"] == needed["GPU"]


def test_the_task_of_skypilot_has_scripts_and_the_gpus_of_the_recipe():
    task = parsed("skypilot.yaml")
    require_shell(task["setup"])
    require_shell(task["run"])
    gpus = int(task["resources"]["accelerators"].partition(":")[2]) * task["num_nodes"]
    assert gpus == rooms_of(load_recipe(ROOT / "recipes" / "cluster_4nodes.yaml")).total["GPU"]


def test_images_have_the_ray_that_is_tested_with():
    named = re.findall(r"rayproject/ray:([\d.]+)|rayVersion: ([\d.]+)", "".join(path.read_text() for path in ALL))
    assert {a or b for a, b in named} == set(re.findall(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.M))
