"""Divides a traced model's layers among k devices: the same graph, with pieces of its matrices and what joins them."""

from collections.abc import Sequence

from torch import fx, nn

from pipebench.errors import GraphError
from pipebench.model.graph import is_random
from pipebench.model.slice_modules import (
    CopiedToSlices,
    Cut,
    DropoutSlices,
    EmbeddingSlices,
    GatheredSlices,
    SliceGroup,
    SummedSlices,
    cut_of,
    narrowed,
    piece,
    with_parameters,
)
from pipebench.model.slicing import DIMENSION, FEATURES, Slicing, find_slices


class Slicer:
    """Divides the graphs of a model, in training and in evaluation, for one device of a group; they share pieces."""

    def __init__(self, group: SliceGroup, *, in_processes: bool = False) -> None:
        self._group, self._in_processes = group, in_processes
        self.cuts: dict[str, Cut] = {}  # of divided parameters, by their names in the graphs
        self._pieces: dict[int, nn.Parameter] = {}  # by the whole parameter's id
        self._modules: dict[int, nn.Module] = {}  # by the whole module's id
        self._wholes: list[nn.Module] = []  # alive, so that no other module gets their ids

    def __call__(self, module: fx.GraphModule) -> None:
        """Divide a graph in place.

        Raises:
            GraphError: nothing can be divided, or features or heads don't divide; or, in processes, a function draws.
        """
        found = find_slices(module, self._group.size)
        calls = {str(node.target): (node, dimension) for node, dimension in found.divided.items()}
        for path, (node, dimension) in calls.items():
            whole = module.get_submodule(path)
            self._wholes.append(whole)
            if id(whole) not in self._modules:
                self._modules[id(whole)] = self._divided(whole, node, dimension, found)
            module.set_submodule(path, self._modules[id(whole)])
            self._note_cuts(path, whole, dimension)
        self._treat_alone(module, found)
        self._copy_inputs(module, [*found.columns, *found.gathered])
        module.graph.lint()
        module.recompile()

    def _divided(self, whole: nn.Module, node: fx.Node, dimension: int, found: Slicing) -> nn.Module:
        """Return what a device has of a module, whose weight is divided in a dimension."""
        parameters = dict(whole._parameters)
        for name, parameter in whole.named_parameters(recurse=False):
            if parameter.dim() > dimension:  # a row's bias stays whole
                parameters[name] = self._piece(parameter, dimension)
        if isinstance(whole, nn.Embedding):
            return EmbeddingSlices(with_parameters(whole, **parameters), self._group, whole.num_embeddings)  # type: ignore[arg-type]
        assert isinstance(whole, nn.Linear)
        kind = found.columns.get(node, FEATURES)
        own = with_parameters(narrowed(whole, kind, self._group.size), **parameters)
        assert isinstance(own, nn.Linear)
        if node in found.rows:
            return SummedSlices(own, self._group)
        return own if node in found.columns else GatheredSlices(own, self._group, whole.out_features)

    def _treat_alone(self, module: fx.GraphModule, found: Slicing) -> None:
        """Refuse functions that draw random numbers for pieces: processes would draw others than for the whole."""
        for node in found.alone if self._in_processes else ():
            if node.op == "call_function" and is_random(module, node):
                function = getattr(node.target, "__name__", node.target)
                raise GraphError(
                    f"parallelism.tensor: got {self._group.size}, and layer {node.name} draws random numbers for "
                    f"pieces by the function {function}: allowed in processes is a module, nn.Dropout"
                )

    def _note_cuts(self, path: str, whole: nn.Module, dimension: int) -> None:
        for name, parameter in whole.named_parameters(recurse=False):
            if parameter.dim() > dimension:
                self.cuts[f"{path}.{name}"] = cut_of(parameter, dimension, self._group)

    def _piece(self, parameter: nn.Parameter, dimension: int) -> nn.Parameter:
        if id(parameter) not in self._pieces:
            own = piece(parameter.detach(), dimension, self._group).clone()
            self._pieces[id(parameter)] = nn.Parameter(own, parameter.requires_grad)
        return self._pieces[id(parameter)]

    def _copied(self) -> nn.Module:
        """Return what stands before what is divided by columns."""
        return CopiedToSlices(self._group)

    def _copy_inputs(self, module: fx.GraphModule, columns: Sequence[fx.Node]) -> None:
        """Let what is divided by columns read copies, one of each value."""
        order = {node: index for index, node in enumerate(module.graph.nodes)}
        readers: dict[fx.Node, list[fx.Node]] = {}
        for node in sorted(columns, key=order.__getitem__):
            readers.setdefault(node.all_input_nodes[0], []).append(node)
        for value, own in readers.items():
            path = f"{value.name}_to_slices"
            module.add_submodule(path, self._copied())
            with module.graph.inserting_before(own[0]):
                copied = module.graph.call_module(path, (value,))
            for node in own:
                node.replace_input_with(value, copied)


class ProcessSlicer(Slicer):
    """Divides layers for a process that trains: dropout draws what it does of the whole."""

    def __init__(self, group: SliceGroup) -> None:
        super().__init__(group, in_processes=True)

    def _treat_alone(self, module: fx.GraphModule, found: Slicing) -> None:
        super()._treat_alone(module, found)
        for node, kind in found.alone.items():
            path = str(node.target)
            if node.op == "call_module" and isinstance(whole := module.get_submodule(path), nn.Dropout):
                self._wholes.append(whole)
                made = DropoutSlices(whole, DIMENSION[kind], self._group)
                module.set_submodule(path, self._modules.setdefault(id(whole), made))
