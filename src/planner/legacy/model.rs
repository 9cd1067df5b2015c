//! A model as the original HPGO represents it: PipeDream's antichain states in its order, with sums for the global
//! batch.

use std::collections::{HashMap, VecDeque};

use crate::error::{Error, Result};
use crate::model::graph::Graph;
use crate::model::states::{BitSet, CutPoints};

/// Limit on antichain states, beyond which [`CutPoints`] is used. The original has no limit and does not return.
const MAX_STATES: usize = 5_000;

/// Sums over the layers of one state, at the global batch size.
#[derive(Debug, Clone, PartialEq)]
pub struct State {
    /// Name of one of its last layers.
    pub description: String,
    /// Forward plus backward seconds on one device.
    pub compute_s: f64,
    /// Bytes of the outputs of all layers inside.
    pub activation_bytes: f64,
    /// Bytes of outputs that may still be read outside.
    pub output_activation_bytes: f64,
    /// Bytes of all weights inside.
    pub parameter_bytes: f64,
}

/// The states of a model in the original's order; the last one holds every layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// States, each after its subsets.
    pub states: Vec<State>,
    /// Earlier states whose layers each state contains, in ascending order.
    pub(super) inside: Vec<Vec<u32>>,
    /// Layers of each state, as positions in `kept`.
    sets: Vec<BitSet>,
    /// Layers of the graph that are part of the states.
    kept: Vec<usize>,
    /// Samples in one step.
    pub global_batch_size: u32,
}

impl Model {
    /// Computes the states of `graph` from its first batch size, with sums scaled to `global_batch_size`.
    ///
    /// Sources whose name starts with `Input` and sinks whose name starts with `__getitem__` are left out, as in the
    /// original.
    ///
    /// # Errors
    /// Returns [`Error::Profile`] if the graph is not usable or takes no time, and [`Error::Argument`] if the batch
    /// size is 0.
    pub fn of(graph: &Graph, global_batch_size: u32) -> Result<Self> {
        if global_batch_size == 0 {
            return Err(Error::argument(
                "the global batch size is 0, but it must be at least 1",
                "set it to 1 or more",
            ));
        }
        graph.check()?;
        graph.topological_order()?;
        let (graph, kept) = without_ends(graph);
        if graph.layers.is_empty() {
            return Err(Error::profile("the profile has no layers but inputs", "add a layer that computes"));
        }
        let (sets, mut states) = match antichains(&graph) {
            Some(found) => found,
            None => fallback(&graph)?,
        };
        // Sums scale in proportion to the batch size, and weights do not. The original knows no other measurement.
        let factor = f64::from(global_batch_size) / f64::from(graph.batch_sizes[0]);
        for state in &mut states {
            state.compute_s *= factor;
            state.activation_bytes *= factor;
            state.output_activation_bytes *= factor;
        }
        if states[states.len() - 1].compute_s <= 0.0 {
            return Err(Error::profile(
                "the model takes no time, but a speed-up needs measured times",
                "measure the layers",
            ));
        }
        #[expect(clippy::cast_possible_truncation, reason = "at most MAX_STATES")]
        let inside_of = |outer: usize| -> Vec<u32> {
            (0..outer).filter(|&inner| sets[inner].is_subset(&sets[outer])).map(|inner| inner as u32).collect()
        };
        let inside = (0..sets.len()).map(inside_of).collect();
        Ok(Self { states, inside, sets, kept, global_batch_size })
    }

    /// Returns an upper bound on the number of states that can be nested.
    pub(super) fn depth(&self) -> usize {
        self.kept.len().min(self.states.len())
    }

    /// Returns the layers of each stage, if stages end with the states in `last`. `graph` must be the one that the
    /// states were computed from.
    ///
    /// A layer that the states leave out joins its first reader or, without readers, its feeder.
    #[must_use]
    pub fn stage_layers(&self, graph: &Graph, last: &[usize]) -> Vec<Vec<usize>> {
        let nowhere = last.len();
        let mut stage_of = vec![nowhere; graph.layers.len()];
        // Later stages first, so that a layer that is in several states gets the first stage whose state contains it.
        for (stage, &state) in last.iter().enumerate().rev() {
            for position in self.sets[state].iter() {
                stage_of[self.kept[position]] = stage;
            }
        }
        for layer in (0..stage_of.len()).filter(|layer| self.kept.binary_search(layer).is_err()) {
            let readers = graph.edges.iter().filter(|edge| edge.0 == layer).map(|edge| stage_of[edge.1]);
            let feeders = graph.edges.iter().filter(|edge| edge.1 == layer).map(|edge| stage_of[edge.0]);
            // An input belongs where it is read first, and an unused output where it is produced.
            let known = readers.min().filter(|&stage| stage < nowhere);
            stage_of[layer] = known.or(feeders.max().filter(|&stage| stage < nowhere)).unwrap_or(0);
        }
        let layers_of = |stage: usize| (0..stage_of.len()).filter(|&layer| stage_of[layer] == stage).collect();
        (0..last.len()).map(layers_of).collect()
    }
}

/// Removes sources called `Input…`, and then sinks called `__getitem__…`. Returns the new graph and the layers that are
/// left.
fn without_ends(graph: &Graph) -> (Graph, Vec<usize>) {
    let has = |ends: &[(usize, usize)], pick: fn(&(usize, usize)) -> usize| {
        let mut found = vec![false; graph.layers.len()];
        for edge in ends {
            found[pick(edge)] = true;
        }
        found
    };
    let fed = has(&graph.edges, |edge| edge.1);
    let is_input = |layer: usize| !fed[layer] && graph.layers[layer].name.starts_with("Input");
    let edges: Vec<_> = graph.edges.iter().copied().filter(|&(from, _)| !is_input(from)).collect();
    let read = has(&edges, |edge| edge.0);
    let is_kept =
        |&layer: &usize| !is_input(layer) && (read[layer] || !graph.layers[layer].name.starts_with("__getitem__"));
    let kept: Vec<usize> = (0..graph.layers.len()).filter(is_kept).collect();
    let index: HashMap<usize, usize> = kept.iter().enumerate().map(|(at, &layer)| (layer, at)).collect();
    let layers = kept.iter().map(|&layer| graph.layers[layer].clone()).collect();
    let edges = edges.iter().filter_map(|(from, to)| Some((*index.get(from)?, *index.get(to)?))).collect();
    (Graph { batch_sizes: graph.batch_sizes.clone(), layers, edges, tied_weights: Vec::new() }, kept)
}

/// A state during the enumeration of antichains.
struct Antichain {
    /// Its last layers. The first one gives the state its description.
    last: Vec<usize>,
    set: BitSet,
    /// States with one more layer, in the order in which they are found, with repeats.
    next: Vec<usize>,
}

/// Returns every down-set that grows from the first source, in the order of PipeDream's topological sort.
///
/// A layer joins once one of its feeders is inside, and all other layers that it needs join with it. So a second source
/// is never added alone. `None` if there are more than [`MAX_STATES`].
fn antichains(graph: &Graph) -> Option<(Vec<BitSet>, Vec<State>)> {
    let count = graph.layers.len();
    let mut after = vec![Vec::new(); count];
    let mut is_source = vec![true; count];
    for &(from, to) in &graph.edges {
        after[from].push(to);
        is_source[to] = false;
    }
    let order = graph.topological_order().ok()?;
    let mut upstream = vec![BitSet::empty(count); count]; // with the layer itself
    for &layer in &order {
        upstream[layer].insert(layer);
        for &reader in &after[layer] {
            upstream[reader] = upstream[reader].union(&upstream[layer]);
        }
    }
    // PipeDream counts a layer upstream of `layer` as crossing if it feeds any layer that is not upstream.
    let crossing: Vec<BitSet> = (0..count)
        .map(|layer| {
            let mut set = BitSet::empty(count);
            upstream[layer]
                .iter()
                .filter(|&other| other != layer && after[other].iter().any(|&reader| !upstream[layer].contains(reader)))
                .for_each(|other| set.insert(other));
            set
        })
        .collect();
    let extras = |last: &[usize]| last.iter().fold(BitSet::empty(count), |all, &layer| all.union(&crossing[layer]));

    // Like PipeDream, growth starts from a single source. Further sources join with their first reader.
    let source = (0..count).find(|&layer| is_source[layer])?;
    let mut found = vec![Antichain { last: vec![source], set: upstream[source].clone(), next: Vec::new() }];
    let mut index = HashMap::from([(upstream[source].clone(), 0)]);
    let mut queue = VecDeque::from([0]);
    while let Some(at) = queue.pop_front() {
        let set = found[at].set.clone();
        let last = found[at].last.clone();
        let feeders: Vec<usize> = extras(&last).iter().chain(last.iter().copied()).collect();
        for feeder in feeders {
            for &reader in after[feeder].iter().filter(|&&reader| !set.contains(reader)) {
                let grown = set.union(&upstream[reader]);
                let next = *index.entry(grown.clone()).or_insert(found.len());
                if next == found.len() {
                    if next == MAX_STATES {
                        return None;
                    }
                    found.push(Antichain {
                        last: replaced(&last, feeder, reader, &upstream),
                        set: grown,
                        next: Vec::new(),
                    });
                    queue.push_back(next);
                }
                found[at].next.push(next);
            }
        }
    }
    let sorted = topological_sort(&found, |at| &graph.layers[found[at].last[0]].name);
    let state = |&at: &usize| {
        let Antichain { last, set, .. } = &found[at];
        let bytes = |layer: usize| graph.layers[layer].measured[0].activation_bytes;
        let output = extras(last).iter().chain(last.iter().copied()).map(bytes).sum();
        summed(graph, set, output, &graph.layers[last[0]].name)
    };
    let states = sorted.iter().map(state).collect();
    Some((sorted.iter().map(|&at| found[at].set.clone()).collect(), states))
}

/// Returns `last` after `reader` has joined through `feeder`: it takes the feeder's place, or else the first one, and
/// removes the layers upstream of it.
fn replaced(last: &[usize], feeder: usize, reader: usize, upstream: &[BitSet]) -> Vec<usize> {
    let mut next = Vec::with_capacity(last.len() + 1);
    if !last.contains(&feeder) {
        next.push(reader);
    }
    for &layer in last {
        if layer == feeder {
            next.push(reader);
        } else if !upstream[reader].contains(layer) {
            next.push(layer);
        }
    }
    next
}

/// Sorts states topologically by depth-first search, with states ordered by description. The last one finished comes
/// first.
fn topological_sort<'a>(found: &[Antichain], description: impl Fn(usize) -> &'a str) -> Vec<usize> {
    let by_description = |states: &[usize]| {
        let mut states = states.to_vec();
        states.sort_by_key(|&at| description(at));
        states
    };
    let mut is_marked = vec![false; found.len()];
    let mut finished = Vec::with_capacity(found.len());
    // An explicit stack instead of recursion, since a model may be deeper than the call stack allows.
    for root in by_description(&(0..found.len()).collect::<Vec<_>>()) {
        let mut path = vec![(usize::MAX, vec![root].into_iter())];
        while let Some((_, waiting)) = path.last_mut() {
            if let Some(at) = waiting.next() {
                if !is_marked[at] {
                    is_marked[at] = true;
                    path.push((at, by_description(&found[at].next).into_iter()));
                }
            } else if let Some((at, _)) = path.pop()
                && at != usize::MAX
            {
                finished.push(at);
            }
        }
    }
    finished.reverse();
    finished
}

/// Returns the states of [`CutPoints`] without the empty one, for models with too many antichains.
fn fallback(graph: &Graph) -> Result<(Vec<BitSet>, Vec<State>)> {
    let found = CutPoints::of(graph, MAX_STATES)?;
    let states = (1..found.len()).map(|at| {
        let mut set = BitSet::empty(graph.layers.len());
        found.layers_between(0, at).into_iter().for_each(|layer| set.insert(layer));
        // Layers are in topological order, so the last one is the newest.
        let newest = found.layers_between(0, at).pop().expect("only the first state is empty");
        let output = found.totals(at, 0).boundary_bytes;
        let state = summed(graph, &set, output, &graph.layers[newest].name);
        (set, state)
    });
    Ok(states.unzip())
}

/// Sums the layers of a state.
fn summed(graph: &Graph, set: &BitSet, output_activation_bytes: f64, description: &str) -> State {
    let mut state = State {
        description: description.to_owned(),
        compute_s: 0.0,
        activation_bytes: 0.0,
        output_activation_bytes,
        parameter_bytes: 0.0,
    };
    for layer in set.iter().map(|layer| &graph.layers[layer]) {
        state.compute_s += layer.measured[0].forward_s + layer.measured[0].backward_s;
        state.activation_bytes += layer.measured[0].activation_bytes;
        state.parameter_bytes += layer.parameter_bytes;
    }
    state
}
