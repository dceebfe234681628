"""A list of PyTorch modules, trained in stages: the bits of the plain loop, and one clear error for each misuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hoist
from hoist.scheduler import workspace
from hoist.scheduler.config import Order
from hoist.scheduler.errors import ConfigError, MisuseError, ModelError
from hoist.scheduler.module_stages import ModuleModel, stage_modules
from hoist.scheduler.runtime import mask_seed
from hoist.tiers.errors import StoreRefusedError
from hoist.tools.opening import open_trainer
from tests.support.commands import hoist as command
from tests.support.training import same_bits, torch_threads

WIDTH, CLASSES, ROWS = 64, 5, 8
NUM_STEPS = 4
STEP_ROWS = (ROWS, 3)
CROSS_ENTROPY = nn.CrossEntropyLoss(reduction="sum")
EXAMPLE = {"inputs": torch.zeros(1, 16), "targets": torch.zeros(1, dtype=torch.int64)}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


class Block(nn.Module):
    """A residual block with a buffer and a frozen parameter."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.register_buffer("offset", torch.linspace(0, 1, WIDTH))

    def forward(self, source: Tensor) -> Tensor:
        inner: Tensor = self.inner(self.norm(source) + self.offset)
        return source + self.scale * nn.functional.gelu(inner)


def modules(seed: int = 0) -> list[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [nn.Linear(16, WIDTH), Block(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, 5)]


def staged(made: Sequence[nn.Module] | None = None, **changes: Any) -> ModuleModel:
    told: dict[str, Any] = {"loss": CROSS_ENTROPY, "example": EXAMPLE, **changes}
    return stage_modules(modules() if made is None else made, **told)


def config(**changes: Any) -> hoist.TrainerConfig:
    told: dict[str, Any] = {
        "host_memory_bytes": 16 * 2**20,
        "micro_batch_size": ROWS,
        "num_micro_batches": 2,
        "optimizer": hoist.AdamWHyperparameters(lr=1e-2, weight_decay=0.1),
        "schedule": hoist.Schedule(kind="constant", lr=1e-2, num_steps=NUM_STEPS),
        "validate": True,
        **changes,
    }
    return hoist.TrainerConfig(**told)


def step_of(number: int) -> list[dict[str, Tensor]]:
    """Micro-batches of different sizes; one target is not counted."""
    generator = torch.Generator().manual_seed(number)
    step = []
    for rows in STEP_ROWS:
        targets = torch.randint(0, CLASSES, (rows,), generator=generator)
        targets[0] = -100
        step.append({"inputs": torch.randn(rows, 16, generator=generator), "targets": targets})
    return step


def train(store: Path, model: ModuleModel, stop: int = NUM_STEPS, **changes: Any) -> list[float]:
    losses = []
    with open_trainer(store, model=model, config=config(**changes), io="direct") as trainer:
        while trainer.step_number < stop:
            losses.append(trainer.step(step_of(trainer.step_number)).loss)
        trainer.commit()
    return losses


def reference(model: nn.Module, lrs: Sequence[float] = (1e-2,) * NUM_STEPS) -> list[float]:
    """The plain loop."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    losses = []
    for number, lr in enumerate(lrs):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        counted = sum(int((batch["targets"] != -100).sum()) for batch in step_of(number))
        parts = []
        for batch in step_of(number):
            loss = CROSS_ENTROPY(model(batch["inputs"]), batch["targets"]) / counted
            loss.backward()
            parts.append(loss.detach())
        optimizer.step()
        losses.append(float(torch.stack(parts).sum()))
    return losses


def assert_holds(store: Path, model: nn.Module) -> None:
    """The store's tensors are the model's, bit for bit."""
    for name, value in model.state_dict().items():
        assert same_bits(torch.from_numpy(hoist.read_tensor(store, name)), value), name


@pytest.mark.parametrize(
    ("plan", "host_memory_mib", "delay"), [("vertical", 4, 0.0), ("horizontal", 4, 0.0), ("vertical", 64, 0.5)]
)
def test_it_is_the_plain_loop_bit_for_bit(tmp_path: Path, plan: Order, host_memory_mib: int, delay: float) -> None:
    """Also when the run is left and resumed with modules of other values, which do not count then."""
    settings: dict[str, Any] = {"plan": plan, "host_memory_bytes": host_memory_mib * 2**20, "delay": delay}
    losses = train(tmp_path / "store", staged(), 2, **settings)
    losses += train(tmp_path / "store", staged(modules(seed=9)), **settings)
    expected = nn.Sequential(*modules())
    assert losses == reference(expected)
    assert_holds(tmp_path / "store", expected)


def test_shared_weights_stay_shared(tmp_path: Path) -> None:
    """One module twice, and the first one's weight in the last: two gradients each, added within rounding."""

    class Untied(nn.Module):
        """Multiplies by the transpose of a weight that another module has too."""

        def __init__(self, first: nn.Linear) -> None:
            super().__init__()
            self.weight = first.weight

        def forward(self, source: Tensor) -> Tensor:
            return (source @ self.weight)[:, :CLASSES]

    def tied() -> list[nn.Module]:
        first, _, middle, _ = modules()
        assert isinstance(first, nn.Linear)
        return [first, middle, nn.Tanh(), middle, Untied(first)]

    model = staged(tied())
    assert [stage.name for stage in model.stages] == ["embed", "layer.0", "layer.1", "layer.2", "head"]
    assert model.stages[3].borrowed == ("1.0.weight", "1.0.bias")
    assert model.stages[4].borrowed == ("0.weight",)
    assert set(model.aliases) == {"3.0.weight", "3.0.bias", "4.weight"}
    losses = train(tmp_path / "store", model)
    expected = nn.Sequential(*tied())
    assert losses == pytest.approx(reference(expected), rel=1e-5)
    for name in ("0.weight", "1.0.weight"):
        got, wanted = torch.from_numpy(hoist.read_tensor(tmp_path / "store", name)), expected.state_dict()[name]
        torch.testing.assert_close(got, wanted, rtol=0.0, atol=1e-4)


def test_dropout_is_recomputed_with_the_same_masks(tmp_path: Path) -> None:
    """Masks depend on seed, step, stage and micro-batch alone, as those of transformers' models do."""

    def dropping() -> list[nn.Module]:
        first, _, middle, last = modules()
        return [first, nn.Sequential(middle, nn.Dropout(0.3)), last]

    losses = train(tmp_path / "store", staged(dropping()), 1)
    plain = dropping()
    total = 0.0
    counted = sum(STEP_ROWS) - len(STEP_ROWS)
    with torch.random.fork_rng(devices=[]):
        for index, batch in enumerate(step_of(0)):
            hidden = batch["inputs"]
            for stage, module in enumerate(plain):
                torch.manual_seed(mask_seed(0, 1, stage, index))
                hidden = module(hidden)
            total += float(CROSS_ENTROPY(hidden, batch["targets"]).detach()) / counted
    assert losses[0] == pytest.approx(total, rel=1e-6)


def test_an_evaluation_is_the_model_without_dropout_and_changes_nothing(tmp_path: Path) -> None:
    def dropping() -> list[nn.Module]:
        first, block, middle, last = modules()
        return [first, block, nn.Sequential(middle, nn.Dropout(0.3)), last]

    plain = train(tmp_path / "plain", staged(dropping()))
    losses = []
    with open_trainer(tmp_path / "store", model=staged(dropping()), config=config()) as trainer:
        found = trainer.evaluate(step_of(7))
        while trainer.step_number < NUM_STEPS:
            losses.append(trainer.step(step_of(trainer.step_number)).loss)
            trainer.evaluate(step_of(7))
    assert losses == plain
    model = nn.Sequential(*dropping()).eval()
    with torch.no_grad():
        total = sum(CROSS_ENTROPY(model(batch["inputs"]), batch["targets"]).item() for batch in step_of(7))
    assert found.counted == sum(STEP_ROWS) - len(STEP_ROWS)
    assert found.loss == pytest.approx(total / found.counted, rel=1e-6)


def test_any_tensors_and_any_loss(tmp_path: Path) -> None:
    """Sequences in, a regression out, its mean over all elements."""
    made: list[nn.Module] = [nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)]
    twin = nn.Sequential(nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    twin.load_state_dict(nn.Sequential(*made).state_dict())
    example = {"inputs": torch.zeros(1, 7, dtype=torch.int64), "targets": torch.zeros(1, 7, 2)}
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randint(0, 11, (ROWS, 7), generator=generator), torch.rand(ROWS, 7, 2, generator=generator)
    model = staged(made, loss=nn.MSELoss(reduction="sum"), example=example)
    with open_trainer(tmp_path / "store", model=model, config=config()) as trainer:
        metrics = trainer.step([{"inputs": inputs, "targets": targets}])
        shorter = trainer.step([{"inputs": inputs[:2, :5], "targets": targets[:2, :5]}])
    assert metrics.loss == pytest.approx(nn.functional.mse_loss(twin(inputs), targets).item(), rel=1e-6)
    assert (metrics.tokens, shorter.tokens) == (ROWS * 7, 10)


def test_a_learning_rate_of_one_s_own(tmp_path: Path) -> None:
    lrs = (1e-2, 0.0, 3e-3, 2e-2)
    with open_trainer(
        tmp_path / "store",
        model=staged(),
        config=config(schedule=hoist.Schedule(kind="constant", lr=1.0, num_steps=0)),
    ) as trainer:
        metrics = [trainer.step(step_of(number), lr=lr) for number, lr in enumerate(lrs)]
        trainer.commit()
        with pytest.raises(ConfigError, match=r"^lr: nan is not a finite number"):
            trainer.step(step_of(9), lr=float("nan"))
        with pytest.raises(ConfigError, match=r"must be 1 to 0, got 5"):
            trainer.step(step_of(9))
    expected = nn.Sequential(*modules())
    assert [step.loss for step in metrics] == reference(expected, lrs)
    assert [step.lr for step in metrics] == list(lrs)
    assert_holds(tmp_path / "store", expected)


# ---------------------------------------------------------------------- initial values


def on_meta() -> list[nn.Module]:
    with torch.device("meta"):
        return [nn.Linear(16, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)]


def test_modules_on_meta_get_their_own_initial_values_from_the_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        train(tmp_path / name, staged(on_meta()), 0, seed=seed)
    first, again, other = (hoist.read_tensor(tmp_path / name, "1.weight") for name in "abc")
    assert (first == again).all()
    assert (first != other).any()
    bound = WIDTH**-0.5
    assert 0.9 * bound < abs(first).max() <= bound


def test_init_fills_what_is_on_meta_and_leaves_the_rest(tmp_path: Path) -> None:
    made = on_meta()
    made[1] = modules()[1]
    filled: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        filled.append(module)
        for value in module.parameters(recurse=False):
            value.fill_(0.25)

    train(tmp_path / "store", staged(made, init=init), 0)
    assert filled == [made[0], made[2]]
    assert (hoist.read_tensor(tmp_path / "store", "0.weight") == 0.25).all()
    expected = modules()[1].state_dict()["inner.weight"]
    assert same_bits(torch.from_numpy(hoist.read_tensor(tmp_path / "store", "1.inner.weight")), expected)


def test_values_that_are_gone_are_not_made_up(tmp_path: Path) -> None:
    """A second new store would begin with other ones; a resumed one needs none, nor do modules on meta."""
    model = staged()
    train(tmp_path / "store", model, 1)
    with pytest.raises(ConfigError, match=r"model: the value that 0\.bias had was let go of when a trainer was opened"):
        train(tmp_path / "other", model, 0)
    assert not (tmp_path / "other").exists()
    train(tmp_path / "store", model, 2)
    model = staged(on_meta())
    for name in ("third", "fourth"):
        train(tmp_path / name, model, 0)
    third, fourth = (hoist.read_tensor(tmp_path / name, "0.weight") for name in ("third", "fourth"))
    assert (third == fourth).all()


def test_what_nobody_fills_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"0\.weight was left without initial values; fill it in init"):
        train(tmp_path / "store", staged(on_meta(), init=lambda module: None), 0)
    with torch.device("meta"):
        block = Block()
    with pytest.raises(ModelError, match=r"a Block of stage layer\.0 was built on the meta device and has no reset_"):
        train(tmp_path / "other", staged([modules()[0], block, modules()[-1]]), 0)
    assert not (tmp_path / "other" / "COMMIT.json").exists()
    with torch.device("meta"):
        numbered = Numbered()
    with pytest.raises(ModelError, match=r"0\.seen was left without initial values; fill it in init"):
        train(tmp_path / "third", staged([numbered, *modules()[1:]]), 0)


def test_the_workspace_of_every_module_counts() -> None:
    """The first and the middle ones are measured each by itself, on fake tensors."""
    wide = nn.Sequential(nn.Linear(WIDTH, 50 * WIDTH), nn.GELU(), nn.Linear(50 * WIDTH, WIDTH))
    first, block, middle, last = modules()
    found = workspace.measure(model := staged([first, block, wide, middle, last]), model.batches.largest(config()))
    assert found.stages[2] > 4 * ROWS * 50 * WIDTH * 3
    assert found.stages[2] > 10 * max(found.stages[1], found.stages[3])
    assert found.boundary_bytes == 4 * ROWS * WIDTH


# ---------------------------------------------------------------------- resuming


def test_a_scheduler_of_torch_goes_on_where_it_was(tmp_path: Path) -> None:
    """Warm-up and cosine, made of torch's own; its state is kept by the commits."""

    def scheduler() -> torch.optim.lr_scheduler.LRScheduler:
        stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=2e-2)
        warmup = torch.optim.lr_scheduler.LinearLR(stand_in, start_factor=0.25, total_iters=2)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(stand_in, T_max=6)
        return torch.optim.lr_scheduler.SequentialLR(stand_in, [warmup, cosine], milestones=[2])

    def run(store: Path, stops: Sequence[int]) -> list[tuple[float, float]]:
        found = []
        for stop in stops:
            rates = scheduler()
            with open_trainer(store, model=staged(), config=config(commit_every=1), io="direct") as trainer:
                for _ in range(trainer.step_number):
                    rates.optimizer.step()
                    rates.step()
                while trainer.step_number < stop:
                    done = trainer.step(step_of(trainer.step_number), lr=float(rates.get_last_lr()[0]))
                    found.append((done.lr, done.loss))
                    rates.optimizer.step()
                    rates.step()
                trainer.commit()
        return found

    whole = run(tmp_path / "whole", [8])
    assert run(tmp_path / "parts", [3, 8]) == whole
    expected = nn.Sequential(*modules())
    assert [loss for _, loss in whole] == reference(expected, [lr for lr, _ in whole])
    assert len({lr for lr, _ in whole}) == 8
    assert_holds(tmp_path / "parts", expected)


class Tiny(nn.Module):
    """Hundreds of parameters of 0 to 4 elements and of no dimension, under names that no file could have."""

    def __init__(self, count: int) -> None:
        super().__init__()
        place: nn.Module = self
        for _ in range(30):
            place.inner_módulo = nn.Module()
            place = place.get_submodule("inner_módulo")
        self.last = [place]
        for number in range(count):
            shape = () if number % 7 == 5 else (number % 5,)
            value = nn.Parameter(torch.full(shape, 0.01 * (number % 11)))
            place.register_parameter(f"{number}/重み {'n' * 20}", value)

    def forward(self, source: Tensor) -> Tensor:
        together = torch.cat([value.flatten() for value in self.last[0].parameters()])
        return source * (1 + (together + 1).sin().sum() / 100)


@pytest.mark.parametrize("count", [75, pytest.param(500, marks=pytest.mark.slow)])
def test_thousands_of_tiny_parameters_with_long_names(count: int, tmp_path: Path) -> None:
    """Trained, committed, resumed, and each read back."""

    def tiny() -> list[nn.Module]:
        first, _, middle, last = modules()
        return [first, *(Tiny(count) for _ in range(4)), middle, last]

    losses = train(tmp_path / "store", staged(tiny()), 2) + train(tmp_path / "store", staged(tiny()), 3)
    expected = nn.Sequential(*tiny())
    assert losses == reference(expected, [1e-2] * 3)
    names = [name for name, _ in expected.named_parameters() if "重み" in name]
    assert len(names) == 4 * count and min(map(len, names)) > 300
    assert sum(value.numel() == 0 for name, value in expected.named_parameters() if "重み" in name) > count // 2
    for name in [*names[::count // 3], "0.weight"]:
        got = torch.from_numpy(hoist.read_tensor(tmp_path / "store", name))
        assert got.shape == expected.get_parameter(name).shape
        assert same_bits(got, expected.get_parameter(name).detach()), name
    assert not [path for path in tmp_path.rglob("*") if "重み" in path.name]


def test_one_more_trainable_module_is_another_model(tmp_path: Path) -> None:
    train(tmp_path / "store", staged(), 1)
    more = [*modules()[:3], nn.Linear(WIDTH, WIDTH), modules()[3]]
    with (
        pytest.raises(StoreRefusedError, match=r"the store holds another model"),
        open_trainer(tmp_path / "store", model=staged(more), config=config()),
    ):
        pass
    assert len(train(tmp_path / "store", staged())) == NUM_STEPS - 1


# ---------------------------------------------------------------------- misuse


def test_a_module_that_is_called_outside_says_why() -> None:
    made = modules()
    model = staged(made)
    for module in made:
        with pytest.raises(ConfigError, match=r"was called outside of a trainer; its weights are in a store"):
            module(torch.zeros(1, 16))
    assert all(bool(value.isnan().all()) for value in model.model.parameters())


def test_a_state_dict_of_absent_weights_is_refused() -> None:
    """It would be saved as a file of NaN."""
    made = modules()
    model = staged(made)
    for module in (*made, model.model):
        with pytest.raises(ConfigError, match=r"^state_dict: the weights of this \w+ are in a store; Trainer"):
            module.state_dict()


class Adding(nn.Linear):
    """Adds the bias of another module, which is no submodule of it."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__(WIDTH, WIDTH)
        self.others = [other]

    def forward(self, source: Tensor) -> Tensor:
        return super().forward(source) + self.others[0].get_parameter("bias")


def with_addition(place: int) -> list[nn.Module]:
    made = modules()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        made.insert(place, Adding(made[0]))
    return made


@pytest.mark.parametrize("place", [1, 3])
def test_a_weight_of_another_module_is_refused_unless_it_is_an_attribute_of_both(place: int, tmp_path: Path) -> None:
    """It is used in an addition, where no module is called that could be noticed."""
    with pytest.raises(ModelError, match=rf"^modules: module {place} uses 0\.bias, a weight of another module, which"):
        train(tmp_path / "store", staged(with_addition(place)))
    assert not (tmp_path / "store").exists()
    made = with_addition(place)
    made[place].added = made[0].get_parameter("bias")
    losses = train(tmp_path / "store", staged(made))
    assert losses == pytest.approx(reference(nn.Sequential(*with_addition(place))), rel=1e-5)


def _backward_in_the_loss(output: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = CROSS_ENTROPY(output, targets)
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (_backward_in_the_loss, r"^loss: it calls backward; return the sum alone"),
        (lambda output, targets: output, r"^loss: returned \(8, 5\); it must return one number"),
        (lambda output, targets: 1.0, r"^loss: returned float; it must return one number"),
    ],
)
def test_a_loss_that_is_none(tmp_path: Path, loss: Callable[[Tensor, Tensor], Tensor], message: str) -> None:
    with pytest.raises(hoist.HoistError, match=message):
        train(tmp_path / "store", staged(loss=loss))


class Counting(nn.Linear):
    """Changes a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, source: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(source)


class Numbered(nn.Linear):
    """Has a whole-number buffer, which its ``reset_parameters`` knows nothing of."""

    def __init__(self) -> None:
        super().__init__(16, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


class Doubling(nn.Linear):
    """Changes what it is given, in place."""

    def forward(self, source: Tensor) -> Tensor:
        return super().forward(source.mul_(2.0))


class Pair(nn.Linear):
    """Returns two tensors."""

    def forward(self, source: Tensor) -> Any:
        return super().forward(source), source


@pytest.mark.parametrize(
    ("middle", "message"),
    [
        (nn.Linear(WIDTH, 32), r"module 1 turns \(8, 64\) into \(8, 32\); those between the first and the last must"),
        (Pair(WIDTH, WIDTH), r"module 1 returns tuple; all but the last must return float32"),
        (Counting(), r"the forward changes the buffer 1\.calls"),
        (Doubling(WIDTH, WIDTH), r"module 1 changes in place what it is given, which the backward needs once more"),
    ],
)
def test_modules_that_cannot_be_stages(tmp_path: Path, middle: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        train(tmp_path / "store", staged([nn.Linear(16, WIDTH), middle, nn.Linear(WIDTH, CLASSES)]))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("position", [0, 1, 2])
def test_what_is_given_stays_as_it_is_also_where_nobody_wants_its_gradient(tmp_path: Path, position: int) -> None:
    """Torch itself objects only where a gradient is wanted; the recomputation would begin with other numbers."""
    made: list[nn.Module] = [nn.Linear(16, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)]
    old = made[position]
    assert isinstance(old, nn.Linear)
    made[position] = Doubling(old.in_features, old.out_features)
    for module in made[:position]:
        module.requires_grad_(False)
    with pytest.raises(ModelError, match=rf"module {position} changes in place what it is given"):
        train(tmp_path / "store", staged(made))
    assert not (tmp_path / "store").exists()


def test_what_is_shared_need_not_be_trained(tmp_path: Path) -> None:
    """A block twice, with its buffer and its frozen scale."""

    def twice() -> list[nn.Module]:
        first, block, middle, last = modules()
        return [first, block, middle, block, last]

    losses = train(tmp_path / "store", staged(twice()))
    expected = nn.Sequential(*twice())
    assert losses == pytest.approx(reference(expected), rel=1e-5)
    assert (hoist.read_tensor(tmp_path / "store", "1.scale") == 0.5).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"made": [nn.Linear(16, 5)]}, r"^modules: 1 given; give two or more"),
        ({"made": [nn.Linear(16, 5), "gelu"]}, r"^modules: number 1 is a str; each must be an nn\.Module"),
        ({"made": [nn.Linear(16, 5), nn.Linear(5, 5, dtype=torch.float64)]}, r"^modules: 1\.weight is torch\.float64"),
        ({"loss": nn.CrossEntropyLoss()}, r"^loss: its reduction is 'mean'; it must be 'sum'"),
        ({"example": {"inputs": torch.zeros(1, 16)}}, r"^example: must be a micro-batch with inputs and targets"),
    ],
)
def test_a_list_that_is_no_model(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(hoist.HoistError, match=message):
        staged(**changes)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"example": {**EXAMPLE, "inputs": torch.zeros(1, 17)}}, {},
         r"^example: modules and loss fail on 8 rows like it \(mat1 and mat2 shapes .*\); give a micro-batch as they"),
        ({}, {"train": ["1.*"]}, r"^train: cannot go with a list of modules; build these as they are to be trained"),
        ({}, {"freeze": ["1.*"], "lora": hoist.LoraOptions(r=2)}, r"^freeze, lora: cannot go with"),
        ({}, {"dropout": 0.0, "attention": "eager"}, r"^attention, dropout: cannot go with"),
    ],
)  # fmt: skip
def test_what_modules_cannot_be_opened_with(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    """And that is not passed over in silence."""
    with pytest.raises(ConfigError, match=message), open_trainer(
        tmp_path / "store", model=staged(**changes), config=config(), **options
    ):
        pass
    assert not (tmp_path / "store").exists()


def test_micro_batches_that_do_not_fit(tmp_path: Path) -> None:
    good = step_of(0)[0]
    inputs, targets = good["inputs"], good["targets"]
    bad: list[tuple[dict[str, Tensor], str]] = [
        ({"inputs": inputs}, r"micro-batch 1: has inputs; for modules it must have inputs and targets"),
        ({"inputs": inputs.double(), "targets": targets}, r"micro-batch 1: inputs are torch\.float64; the example has"),
        ({"inputs": torch.zeros(9, 16), "targets": targets}, r"inputs have shape \(9, 16\); at most \(8, 16\) fit"),
        ({"inputs": torch.zeros(8, 2, 16), "targets": targets}, r"inputs have shape \(8, 2, 16\); at most"),
        ({"inputs": inputs[:4], "targets": targets}, r"4 rows of inputs and 8 of targets; there must be as many"),
    ]
    with open_trainer(tmp_path / "store", model=staged(), config=config()) as trainer:
        for batch, message in bad:
            with pytest.raises(ConfigError, match=message):
                trainer.step([good, batch])
        with pytest.raises(ConfigError, match=r"^targets: nothing in this step counts"):
            trainer.step([{"inputs": inputs, "targets": torch.full_like(targets, -100)}])
        assert trainer.step_number == 0
        trainer.step([good])


def test_a_trainer_says_where_what_it_has_not_is(tmp_path: Path) -> None:
    with open_trainer(tmp_path / "store", model=staged(), config=config()) as trainer:
        untyped: Any = trainer
        with pytest.raises(MisuseError, match=r"^a Trainer has no 'backward': step\(\) runs the forward, the backward"):
            untyped.backward(torch.zeros(()))
        with pytest.raises(hoist.HoistError, match=r"^a Trainer has no 'stepp'$"):
            untyped.stepp()
        assert not hasattr(trainer, "zero_grad")
    with pytest.raises(ConfigError, match=r"this trainer is closed"):
        trainer.step(step_of(0))


def test_a_store_of_modules_is_no_transformers_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "store", staged(), 0)
    with (
        pytest.raises(StoreRefusedError, match=r"the store holds modules, no transformers model"),
        open_trainer(tmp_path / "store", config=config()),
    ):
        pass
    store, out = tmp_path / "store", tmp_path / "out"
    for words in (("export", store, out), ("train", "--store", store, "--data", __file__)):
        ended = command(capfd, *words)
        assert ended.code == 2
        assert "the store holds modules, no transformers model; train it from Python" in ended.err
    assert not out.exists()
    with (
        pytest.raises(StoreRefusedError, match=r"the store holds another model"),
        open_trainer(tmp_path / "store", model=staged(on_meta()), config=config()),
    ):
        pass
