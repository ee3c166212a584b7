"""Ways to wait too long, to keep too much, or to train on the wrong weights."""

import torch
import torch.nn.functional as F

from deepseek_lab.model.split_backward import DeferrableLinear, deferred
from deepseek_lab.parallel.pipedream import OverwrittenWeights, StashedWeights
from deepseek_lab.plan.schedules import Action, one_f_one_b
from tests.wrong_answers import Wrong


def each(kinds, micro_batches):
    return [Action(kind, m) for m in micro_batches for kind in kinds]


# 6.1 ----------------------------------------------------------------------------------------------------------


def one_after_the_other(rank, ranks, micro_batches):
    return each("FB", range(micro_batches))


def newest_first(rank, ranks, micro_batches):
    return each("F", range(micro_batches)) + each("B", range(micro_batches - 1, -1, -1))


def from_one(rank, ranks, micro_batches):
    return each("F", range(1, micro_batches + 1)) + each("B", range(1, micro_batches + 1))


def as_many_as_ranks(rank, ranks, micro_batches):
    return each("F", range(ranks)) + each("B", range(ranks))


def forwards_only(rank, ranks, micro_batches):
    return each("F", range(micro_batches))


def already_1f1b(rank, ranks, micro_batches):
    return list(one_f_one_b(rank, ranks, micro_batches))


def as_words(rank, ranks, micro_batches):
    return [f"F{m}" for m in range(micro_batches)] + [f"B{m}" for m in range(micro_batches)]


def nothing(rank, ranks, micro_batches):
    return None


def four_ranks(rank, ranks, micro_batches):
    return each("F", range(micro_batches)) + each("B", range(micro_batches)) if rank < 4 else []


def up_to_64(rank, ranks, micro_batches):
    few = min(micro_batches, 64)
    return each("F", range(few)) + each("B", range(few))


# 6.2 ----------------------------------------------------------------------------------------------------------


def _peak(change, steps=lambda action: action.steps(), at_the_end=False, keep=lambda step: True):
    def peak_activations(actions):
        kept = most = 0
        for action in actions:
            for step in steps(action):
                kept += change.get(step.kind, 0) if keep(step) else 0
                most = max(most, kept)
        return kept if at_the_end else most

    return peak_activations


RIGHT = {"F": 1, "B": -1, "W": -1}


def by_number(actions):
    return max((action.micro_batch + 1 for action in actions if action.kind == "F"), default=0)


def counts_messages(actions):
    def steps(action):
        return (Action(action.of, 0),) if action.kind == "RECV" else action.steps()

    return _peak(RIGHT, steps)(actions)


def uses_up(actions):
    kept = most = 0
    while actions:
        for step in actions.pop(0).steps():
            kept += RIGHT.get(step.kind, 0)
            most = max(most, kept)
    return most


def needs_a_list(actions):
    kept = most = 0
    for i in range(len(actions)):
        for step in actions[i].steps():
            kept += RIGHT.get(step.kind, 0)
            most = max(most, kept)
    return most


def goes_through_twice(actions):
    n_forwards = sum(step.kind == "F" for action in actions for step in action.steps())
    return min(n_forwards, _peak(RIGHT)(actions))


# 6.3 ----------------------------------------------------------------------------------------------------------


def _ahead(number, clamp=True, drain=True, backward=lambda m, ahead: m):
    def order(rank, ranks, micro_batches):
        ahead = min(number(rank, ranks), micro_batches) if clamp else number(rank, ranks)
        for m in range(ahead):
            yield Action("F", m)
        for m in range(micro_batches):
            if m + ahead < micro_batches:
                yield Action("F", m + ahead)
            elif not drain:
                return
            yield Action("B", backward(m, ahead))

    return order


def backward_first(rank, ranks, micro_batches):
    ahead = min(ranks - rank - 1, micro_batches)
    order = each("F", range(ahead))
    for m in range(micro_batches):
        order.append(Action("B", m))
        if m + ahead < micro_batches:
            order.append(Action("F", m + ahead))
    return order


def all_forwards_first(rank, ranks, micro_batches):
    return each("F", range(micro_batches)) + each("B", range(micro_batches))


def two_by_two(rank, ranks, micro_batches):
    order = list(one_f_one_b(rank, ranks, micro_batches))
    return order[:-2] + order[-1:] + order[-2:-1] if rank == 0 and len(order) > 2 else order


# 6.4 ----------------------------------------------------------------------------------------------------------


def put_off(weights, work_out):
    """Whether the weight part was put off."""
    parts = deferred(*weights)
    if parts is not None:
        parts.put(weights, work_out)
    return parts is not None


def _linear(dx=lambda dy, w: dy @ w, dw=None, defer=put_off, save=None):
    """The right one, with parts exchanged."""
    weight_gradient = dw or (lambda dy, x: dy.flatten(0, -2).T @ x.flatten(0, -2))

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w_FD):
            y = F.linear(x, w_FD)
            ctx.save_for_backward(*(save(x, w_FD, y) if save else (x, w_FD)))
            ctx.weight = w_FD
            return y

        @staticmethod
        def backward(ctx, dy):
            x, w_FD = ctx.saved_tensors[:2]
            dx_ = dx(dy, w_FD) if ctx.needs_input_grad[0] else None
            if not ctx.needs_input_grad[1] or defer([ctx.weight], lambda: (weight_gradient(dy, x),)):
                return dx_, None
            return dx_, weight_gradient(dy, x)

    return Linear


class WorkedOutAtOnce(DeferrableLinear):
    @staticmethod
    def backward(ctx, dy):
        x, w_FD = ctx.saved_tensors
        dx = dy @ w_FD if ctx.needs_input_grad[0] else None
        dw = dy.flatten(0, -2).T @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        if dw is None or put_off([ctx.weight], lambda: (dw,)):
            return dx, None
        return dx, dw


class AlwaysPutOff(DeferrableLinear):
    @staticmethod
    def backward(ctx, dy):
        x, w_FD = ctx.saved_tensors
        put_off([ctx.weight], lambda: (dy.flatten(0, -2).T @ x.flatten(0, -2),))
        return dy @ w_FD, None


class NeverPutOff(DeferrableLinear):
    @staticmethod
    def backward(ctx, dy):
        x, w_FD = ctx.saved_tensors
        return dy @ w_FD, dy.flatten(0, -2).T @ x.flatten(0, -2)


class TwiceOver(DeferrableLinear):
    @staticmethod
    def backward(ctx, dy):
        x, w_FD = ctx.saved_tensors
        put_off([ctx.weight], lambda: (dy.flatten(0, -2).T @ x.flatten(0, -2),))
        return dy @ w_FD, dy.flatten(0, -2).T @ x.flatten(0, -2)


class InputPutOff(DeferrableLinear):
    @staticmethod
    def backward(ctx, dy):
        x, w_FD = ctx.saved_tensors
        if put_off([ctx.weight], lambda: (dy.flatten(0, -2).T @ x.flatten(0, -2),)):
            return None, None
        return dy @ w_FD, dy.flatten(0, -2).T @ x.flatten(0, -2)


class ThrownAway(DeferrableLinear):
    @staticmethod
    def backward(ctx, dy):
        from deepseek_lab.model import split_backward

        x, w_FD = ctx.saved_tensors
        dw = None if split_backward._parts is not None else dy.flatten(0, -2).T @ x.flatten(0, -2)
        return dy @ w_FD, dw


class Frozen(DeferrableLinear):
    @staticmethod
    def backward(ctx, dy):
        x, w_FD = ctx.saved_tensors

        def weight_part():
            return (dy.flatten(0, -2).T @ x.flatten(0, -2),)

        dx = dy @ w_FD if ctx.needs_input_grad[0] else None
        return (dx, None) if put_off([ctx.weight], weight_part) else (dx, *weight_part())


class AlwaysDx(DeferrableLinear):
    @staticmethod
    def backward(ctx, dy):
        x, w_FD = ctx.saved_tensors

        def weight_part():
            return (dy.flatten(0, -2).T @ x.flatten(0, -2),)

        dx = dy @ w_FD
        if not ctx.needs_input_grad[1] or put_off([ctx.weight], weight_part):
            return dx, None
        return dx, *weight_part()


class SomebodyElses(DeferrableLinear):
    @staticmethod
    def backward(ctx, dy):
        x, w_FD = ctx.saved_tensors

        def weight_part():
            return ()

        def whole():
            return dy.flatten(0, -2).T @ x.flatten(0, -2)

        def late():
            ctx.weight.grad = whole()
            return weight_part()

        dx = dy @ w_FD if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1] or put_off([], late):
            return dx, None
        return dx, whole()


class OfATwin(DeferrableLinear):
    @staticmethod
    def backward(ctx, dy):
        x, w_FD = ctx.saved_tensors

        def weight_part():
            return (dy.flatten(0, -2).T @ x.flatten(0, -2),)

        dx = dy @ w_FD if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1] or put_off([w_FD], weight_part):
            return dx, None
        return dx, *weight_part()


class OverwritesDy(DeferrableLinear):
    @staticmethod
    def backward(ctx, dy):
        x, w_FD = ctx.saved_tensors
        rows, dx = dy.flatten(0, -2).clone(), dy @ w_FD
        dy.zero_()

        def weight_part():
            return (rows.T @ x.flatten(0, -2),)

        if put_off([ctx.weight], weight_part):
            return dx, None
        return dx, *weight_part()


class WeightPartTwice(DeferrableLinear):
    @staticmethod
    def backward(ctx, dy):
        x, w_FD = ctx.saved_tensors

        def weight_part():
            _ = dy @ w_FD
            return (dy.flatten(0, -2).T @ x.flatten(0, -2),)

        dx = dy @ w_FD if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1] or put_off([ctx.weight], weight_part):
            return dx, None
        return dx, *weight_part()


class FrozenAllTheSame(DeferrableLinear):
    @staticmethod
    def backward(ctx, dy):
        x, w_FD = ctx.saved_tensors
        dx = dy @ w_FD if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1] and put_off([ctx.weight], lambda: (dy.flatten(0, -2).T @ x.flatten(0, -2),)):
            return dx, None
        return dx, dy.flatten(0, -2).T @ x.flatten(0, -2)


class NeverAsks(DeferrableLinear):
    @staticmethod
    def backward(ctx, dy):
        x, w_FD = ctx.saved_tensors
        deferred(ctx.weight).put([ctx.weight], lambda: (dy.flatten(0, -2).T @ x.flatten(0, -2),))
        return dy @ w_FD, None


class NoTuple(DeferrableLinear):
    @staticmethod
    def backward(ctx, dy):
        x, w_FD = ctx.saved_tensors

        def weight_part():
            return dy.flatten(0, -2).T @ x.flatten(0, -2)

        dx = dy @ w_FD if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1] or put_off([ctx.weight], weight_part):
            return dx, None
        return dx, weight_part()


class KeptBeside(DeferrableLinear):
    @staticmethod
    def forward(ctx, x, w_FD):
        ctx.inputs = [x]
        return DeferrableLinear.forward(ctx, x, w_FD)


# 6.5 ----------------------------------------------------------------------------------------------------------


def _bubble(turn="IWF", due=lambda m, w, behind: m - w >= behind, clamp=True, rest=True, stop=False):
    def zero_bubble(micro_batches, ahead, behind):
        forward, weight = min(ahead, micro_batches) if clamp else ahead, 0
        order = each("F", range(forward))
        for m in range(micro_batches):
            left = forward < micro_batches
            for kind in turn:
                if kind == "I":
                    order.append(Action("I", m))
                elif kind == "F" and forward < micro_batches:
                    order.append(Action("F", forward))
                    forward += 1
                elif kind == "W" and due(m, weight, behind) and (left or not stop):
                    order.append(Action("W", weight))
                    weight += 1
        return order + (each("W", range(weight, micro_batches)) if rest else [])

    return zero_bubble


def not_split(micro_batches, ahead, behind):
    order, forward = each("F", range(min(ahead, micro_batches))), min(ahead, micro_batches)
    for m in range(micro_batches):
        order.append(Action("B", m))
        if forward < micro_batches:
            order.append(Action("F", forward))
            forward += 1
    return order


# 6.6 ----------------------------------------------------------------------------------------------------------


def _step(self, m, lr, start="newest", clear=True, forget=True, graph=False, grad=True):
    met = self.met.pop(m) if forget else self.met[m]
    with torch.set_grad_enabled(graph):
        base = self.newest if start == "newest" else met
        self.newest = {name: w - lr * met[name].grad for name, w in base.items()}
    if grad and not graph:
        self.newest = {name: w.requires_grad_() for name, w in self.newest.items()}
    for w in met.values() if clear else ():
        w.grad = None


class FromItsOwn(StashedWeights):
    def update(self, m, lr):
        _step(self, m, lr, start="met")


class AddsUp(StashedWeights):
    def update(self, m, lr):
        _step(self, m, lr, clear=False)


class Remembers(StashedWeights):
    def update(self, m, lr):
        _step(self, m, lr, forget=False)


class DragsThePast(StashedWeights):
    def update(self, m, lr):
        _step(self, m, lr, graph=True)


class TakesNoGradient(StashedWeights):
    def update(self, m, lr):
        _step(self, m, lr, grad=False)


class Uphill(StashedWeights):
    def update(self, m, lr):
        _step(self, m, -lr)


class NoRate(StashedWeights):
    def update(self, m, lr):
        _step(self, m, 1.0)


class CopiesForEach(StashedWeights):
    def forward(self, m):
        self.met[m] = {name: w.detach().clone().requires_grad_() for name, w in self.newest.items()}
        return self.met[m]


class ForgetsWhatWasMet(StashedWeights):
    def forward(self, m):
        self.met[m] = dict(self.newest)
        return self.newest


class NeverUpdates(StashedWeights):
    def update(self, m, lr):
        for w in self.met.pop(m).values():
            w.grad = None


class TrainsTheCallers(StashedWeights):
    def __init__(self, weights):
        self.newest, self.met, self.given = dict(weights), {}, weights
        self.newest = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}

    def update(self, m, lr):
        super().update(m, lr)
        for name, w in self.newest.items():
            self.given[name].data.copy_(w.detach())


class InSinglePrecision(StashedWeights):
    def __init__(self, weights):
        super().__init__({name: w.float() for name, w in weights.items()})


class OnTheNewest(StashedWeights):
    def update(self, m, lr):
        del self.met[m]
        with torch.no_grad():
            newest = {name: (w - lr * w.grad).requires_grad_() for name, w in self.newest.items()}
        self.newest = newest


class SharesMemory(StashedWeights):
    def __init__(self, weights):
        self.newest, self.met = {name: w.detach().requires_grad_() for name, w in weights.items()}, {}


class TheCallersOwn(StashedWeights):
    def __init__(self, weights):
        self.newest, self.met = dict(weights), {}


class ChangesTheGiven(StashedWeights):
    def __init__(self, weights):
        self.newest, self.met = {name: w.requires_grad_() for name, w in weights.items()}, {}


class FirstTakesNoGradient(StashedWeights):
    def __init__(self, weights):
        self.newest, self.met = {name: w.detach().clone() for name, w in weights.items()}, {}


class MetIsAList(StashedWeights):
    def __init__(self, weights):
        super().__init__(weights)
        self.met = [None] * 100


class KeepsAllVersions(StashedWeights):
    def forward(self, m):
        self.past = [*getattr(self, "past", []), self.newest]
        return super().forward(m)


class KeepsCopiesOfAllVersions(StashedWeights):
    def forward(self, m):
        copied = {name: w.detach().clone() for name, w in self.newest.items()}
        self.past = {**getattr(self, "past", {}), m: copied}
        return super().forward(m)


class LetsGoOfTheOldest(StashedWeights):
    def update(self, m, lr):
        _step(self, min(self.met), lr)


class ZeroesGradients(StashedWeights):
    def update(self, m, lr):
        met = self.met[m]
        _step(self, m, lr, clear=False)
        for w in met.values():
            w.grad.zero_()


class UpdatesInSinglePrecision(StashedWeights):
    def update(self, m, lr):
        met = self.met.pop(m)
        self.newest = {
            name: (w.detach().float() - lr * met[name].grad.float()).double().requires_grad_()
            for name, w in self.newest.items()
        }
        for w in met.values():
            w.grad = None


WRONG = [
    Wrong("6.1", one_after_the_other, "each micro-batch goes through before the next one starts: no pipeline"),
    Wrong("6.1", newest_first, "backwards from the last micro-batch to the first"),
    Wrong("6.1", from_one, "micro-batches are counted from 1"),
    Wrong("6.1", as_many_as_ranks, "as many micro-batches as ranks"),
    Wrong("6.1", forwards_only, "backward is missing"),
    Wrong("6.1", already_1f1b, "this is 1F1B already"),
    Wrong("6.1", as_words, "no actions"),
    Wrong("6.1", four_ranks, "ranks from the fifth on do nothing"),
    Wrong("6.1", up_to_64, "no more than 64 micro-batches"),
    Wrong("6.1", nothing),
    Wrong("6.2", _peak(RIGHT, lambda action: (action,)), "the overlaps are not taken apart"),
    Wrong("6.2", _peak({"F": 1, "B": -1, "I": -1}), "activations are let go of in I, before W has used them"),
    Wrong("6.2", _peak({"F": 1, "B": -1, "I": -1, "W": -1}), "a split backward lets go twice"),
    Wrong("6.2", _peak({"F": 1, "B": -1}), "a split backward never lets go"),
    Wrong("6.2", _peak(RIGHT, at_the_end=True), "what is kept at the end, not at the most"),
    Wrong("6.2", _peak({"F": 1}), "all forwards are counted"),
    Wrong("6.2", _peak(RIGHT, keep=lambda step: step.chunk == 0), "only the first chunk is counted"),
    Wrong("6.2", counts_messages, "a message counts as the work that it carries"),
    Wrong("6.2", by_number, "the micro-batch with the highest number"),
    Wrong("6.2", uses_up, "it uses up its input"),
    Wrong("6.2", needs_a_list, "only a list will do"),
    Wrong("6.2", goes_through_twice),
    Wrong("6.3", all_forwards_first, "all forwards come first: that is GPipe"),
    Wrong("6.3", _ahead(lambda r, p: 0), "no forwards run ahead: no pipeline"),
    Wrong("6.3", _ahead(lambda r, p: p - r), "one forward too many runs ahead"),
    Wrong("6.3", _ahead(lambda r, p: max(p - r - 2, 0)), "one forward too few runs ahead"),
    Wrong("6.3", _ahead(lambda r, p: p - 1), "every rank runs as far ahead as the first"),
    Wrong("6.3", _ahead(lambda r, p: r), "ranks are counted from the wrong end"),
    Wrong("6.3", _ahead(lambda r, p: max(3 - r, 0)), "four ranks are built in"),
    Wrong("6.3", _ahead(lambda r, p: p - r - 1, clamp=False), "more forwards run ahead than there are micro-batches"),
    Wrong("6.3", _ahead(lambda r, p: p - r - 1, drain=False), "the last backwards are missing"),
    Wrong(
        "6.3",
        _ahead(lambda r, p: p - r - 1, backward=lambda m, ahead: m + ahead),
        "backward of the micro-batch that has just come",
    ),
    Wrong("6.3", backward_first, "in the steady state backward comes first"),
    Wrong("6.3", two_by_two),
    Wrong("6.4", WorkedOutAtOnce, "the weight part is worked out at once and only handed over late"),
    Wrong("6.4", AlwaysPutOff, "the weight part is lost where nothing is put off"),
    Wrong("6.4", NeverPutOff, "nothing is put off"),
    Wrong("6.4", TwiceOver, "put off, and worked out at once as well"),
    Wrong("6.4", InputPutOff, "the gradient of x is put off too: nobody can go on"),
    Wrong("6.4", ThrownAway, "the weight part is thrown away"),
    Wrong("6.4", Frozen, "a frozen weight gets a weight part"),
    Wrong("6.4", AlwaysDx, "it works out a gradient of x that nobody needs"),
    Wrong("6.4", SomebodyElses, "it does not say whose gradient it is"),
    Wrong("6.4", OfATwin, "the gradient goes to a twin of the weight, not to the weight itself"),
    Wrong("6.4", OverwritesDy, "it overwrites what it was given"),
    Wrong("6.4", _linear(dx=lambda dy, w: dy @ w.T), "the gradient of x takes the transposed weight"),
    Wrong(
        "6.4",
        _linear(dw=lambda dy, x: x.flatten(0, -2).T @ dy.flatten(0, -2)),
        "the gradient of w is transposed",
    ),
    Wrong(
        "6.4",
        _linear(dw=lambda dy, x: dy.flatten(0, -2).float().T.double() @ x.flatten(0, -2)),
        "digits are lost",
    ),
    Wrong(
        "6.4",
        _linear(dw=lambda dy, x: (dy[0].T @ x[0]) if dy.dim() == 3 else dy.T @ x),
        "only the first sequence of the batch is counted",
    ),
    Wrong("6.4", _linear(save=lambda x, w, y: (x, w, y)), "it keeps more than x and w"),
    Wrong("6.4", _linear(save=lambda x, w, y: (x.clone(), w)), "it keeps a copy"),
    Wrong("6.4", KeptBeside, "a tensor is kept beside the saved ones"),
    Wrong("6.4", WeightPartTwice, "the weight part works twice"),
    Wrong("6.4", FrozenAllTheSame, "it works out a gradient of w that nobody needs"),
    Wrong("6.4", NeverAsks, "it does not ask whether anything is put off"),
    Wrong("6.4", NoTuple, "a tensor instead of a tuple"),
    Wrong("6.4", _linear(dw=lambda dy, x: dy.mT @ x), "three dimensions are not made into rows"),
    Wrong(
        "6.4",
        _linear(dw=lambda dy, x: torch.einsum("btf,btd->fd", dy, x) if dy.dim() == 3 else dy.mT @ x),
        "four dimensions are not made into rows",
    ),
    Wrong("6.5", _bubble("IF"), "all weight parts wait for the end"),
    Wrong("6.5", _bubble(due=lambda m, w, behind: m >= w), "`behind` is ignored: W right after its I"),
    Wrong("6.5", _bubble(due=lambda m, w, behind: m - w > behind), "W comes one micro-batch too late"),
    Wrong("6.5", _bubble(due=lambda m, w, behind: m - w >= behind - 1), "W comes one micro-batch too early"),
    Wrong("6.5", _bubble("FIW"), "the forward comes first: one more micro-batch is kept"),
    Wrong("6.5", _bubble("IFW"), "the weight part comes after the forward"),
    Wrong("6.5", _bubble("WIF"), "the weight part comes before the input part"),
    Wrong("6.5", _bubble(rest=False), "weight parts that remain are lost"),
    Wrong("6.5", _bubble(clamp=False), "more forwards run ahead than there are micro-batches"),
    Wrong("6.5", _bubble(stop=True), "weight parts stop when the forwards have run out"),
    Wrong("6.5", not_split, "backward is not split"),
    Wrong("6.6", OverwrittenWeights, "a version changes under micro-batches on their way"),
    Wrong("6.6", FromItsOwn, "it steps from the version that was met: the updates since are lost"),
    Wrong("6.6", AddsUp, "gradients of micro-batches that share a version add up"),
    Wrong("6.6", Remembers, "what was met is never forgotten"),
    Wrong("6.6", DragsThePast, "the update is a part of the graph"),
    Wrong("6.6", TakesNoGradient, "the new version takes no gradient"),
    Wrong("6.6", Uphill, "uphill"),
    Wrong("6.6", NoRate, "the learning rate is forgotten"),
    Wrong("6.6", CopiesForEach, "a copy for every micro-batch, not every version"),
    Wrong("6.6", ForgetsWhatWasMet, "it does not remember what was met"),
    Wrong("6.6", NeverUpdates, "nothing is updated"),
    Wrong("6.6", TrainsTheCallers, "it trains the caller's own tensors"),
    Wrong("6.6", InSinglePrecision, "digits are lost"),
    Wrong("6.6", OnTheNewest),
    Wrong("6.6", UpdatesInSinglePrecision, "digits are lost in the update"),
    Wrong("6.6", ZeroesGradients, "gradients are zeroed, but not gone"),
    Wrong("6.6", SharesMemory, "the first version shares its memory with the caller"),
    Wrong("6.6", TheCallersOwn, "the first version is the caller's own tensors"),
    Wrong("6.6", ChangesTheGiven, "the caller's tensors are made to take gradients"),
    Wrong("6.6", FirstTakesNoGradient, "the first version takes no gradient"),
    Wrong("6.6", MetIsAList, "`met` is no dictionary"),
    Wrong("6.6", KeepsAllVersions, "old versions are kept aside"),
    Wrong("6.6", KeepsCopiesOfAllVersions, "copies of old versions are kept aside"),
    Wrong("6.6", LetsGoOfTheOldest, "it lets go of the oldest, not of m"),
]
