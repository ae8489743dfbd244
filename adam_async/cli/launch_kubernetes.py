"""The command `launch k8s`: write the manifests of a run on Kubernetes into a folder."""

import shlex
import sys
from pathlib import Path

from adam_async.cli.files import read_file
from adam_async.cli.kubernetes_options import KubernetesOptions
from adam_async.cli.printable import printable
from adam_async.cli.token import new_root_token
from adam_async.errors import ConfigError
from adam_async.launch.kubernetes import KubernetesRun, Storage, UserCode, check, files_of, read_resources
from adam_async.launch.manifests import manifests, text_of
from adam_async.messages.body import ROLES
from adam_async.run.config import Config
from adam_async.run.option_sources import from_toml, make_config
from adam_async.run.role_memory import read_memory
from adam_async.run.token_file import derived_text
from adam_async.runtime.disk import Disk


async def write_manifests(file: Path, options: KubernetesOptions) -> int:
    """Write the manifests of the run that a file of options describes.

    Raises:
        ConfigError: The file or an option is wrong, or the folder is not empty or cannot be written.
    """
    async with Disk() as disk:
        await _check_empty(options.out, disk)
        config, files = await _read_run(file, disk)
        run = KubernetesRun(
            name=options.name,
            image=options.image,
            config=config,
            files=files,
            secret=options.secret,
            resources=read_resources(options.resources, read_memory(config.memory)),
            storage=Storage(
                state=options.state,
                results=options.results,
                temporary=options.temporary,
                storage_class=options.storage_class,
                data_claim=options.data_claim,
            ),
            code=UserCode(
                step=options.step or "",
                step_args=options.step_args or "",
                layers=options.layers,
                folders=options.step_path,
            ),
            spread=options.spread,
        )
        check(run)
        token = new_root_token()
        keys = {} if options.secret else {role: derived_text(token, role) for role in ROLES}
        texts = {name: text_of(manifest) for name, manifest in manifests(run, keys).items()}
        try:
            for name, text in texts.items():
                path = options.out / name
                await disk.make_folder(path.parent)
                # The file of the Secret has the keys.
                await disk.write_private(path, text.encode())
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"--out {options.out} cannot be written: {why}; name another folder") from None
    folder = shlex.quote(str(options.out))
    sys.stdout.write(f"{printable(f'wrote {len(texts)} files; next: kubectl apply -f {folder}')}\n")
    return 0


async def _check_empty(folder: Path, disk: Disk) -> None:
    try:
        names = await disk.names(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"--out {folder} is no folder to write to: {error.strerror or error}") from None
    if names:
        raise ConfigError(
            f"--out {folder} is not empty, and kubectl would apply its files, too: remove them, or name "
            "another folder"
        )


async def _read_run(file: Path, disk: Disk) -> tuple[Config, dict[str, str]]:
    """Read the options of a run, and the text of all its files by relative path."""
    text = await read_file(file, "the file of options", disk)
    config = make_config(from_toml(text, source=str(file)), sources=(str(file),))
    files = {name: await read_file(file.parent / name, str(file), disk) for name in files_of(config)}
    return config, {"adam.toml": text, **files}
