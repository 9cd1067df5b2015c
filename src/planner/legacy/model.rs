//! The model as the original HPGO sees it: PipeDream's antichain states in its order, with sums at the global batch.

use std::collections::{HashMap, VecDeque};

use crate::error::{Error, Result};
use crate::model::graph::Graph;
use crate::model::states::{BitSet, CutPoints};

/// Antichain states listed before [`CutPoints`] takes over. The original has no bound and does not return.
const MOST_STATES: usize = 5_000;

/// Sums over the layers of one state, at the global batch size.
#[derive(Debug, Clone, PartialEq)]
pub struct State {
    /// Description of one of its last layers.
    pub description: String,
    /// Forward plus backward seconds on one device.
    pub compute_s: f64,
    /// Outputs of all layers inside.
    pub activation_bytes: f64,
    /// Outputs that may still be read outside.
    pub output_activation_bytes: f64,
    /// Weights.
    pub parameter_bytes: f64,
}

/// The states of a model in the original's order; the last one holds every layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Each after its subsets.
    pub states: Vec<State>,
    /// For each state, the states before it whose layers it contains, ascending.
    pub(super) inside: Vec<Vec<u32>>,
    /// Layers of each state, as positions in `kept`.
    sets: Vec<BitSet>,
    /// Layers of the graph that count.
    kept: Vec<usize>,
    /// Samples in one step.
    pub global_batch_size: u32,
}

impl Model {
    /// The states of `graph`, measured at its first batch size, with sums scaled to `global_batch_size`.
    ///
    /// Layer names that start with `Input` (sources) or `__getitem__` (sinks) are left out, as the original does.
    ///
    /// # Errors
    /// [`Error::Profile`] if the graph is not usable or takes no time; [`Error::Argument`] if the batch size is 0.
    pub fn of(graph: &Graph, global_batch_size: u32) -> Result<Self> {
        if global_batch_size == 0 {
            return Err(Error::argument("the global batch size is 0", "a step needs at least one sample"));
        }
        graph.check()?;
        graph.topological_order()?;
        let (graph, kept) = without_ends(graph);
        if graph.layers.is_empty() {
            return Err(Error::profile(
                "the profile has no layers but inputs",
                "a profile needs a layer that computes",
            ));
        }
        let (sets, mut states) = match antichains(&graph) {
            Some(found) => found,
            None => fallback(&graph)?,
        };
        let factor = f64::from(global_batch_size) / f64::from(graph.batch_sizes[0]);
        for state in &mut states {
            state.compute_s *= factor;
            state.activation_bytes *= factor;
            state.output_activation_bytes *= factor;
        }
        if states[states.len() - 1].compute_s <= 0.0 {
            return Err(Error::profile("the model takes no time", "a speed-up needs measured times"));
        }
        #[expect(clippy::cast_possible_truncation, reason = "at most MOST_STATES")]
        let inside_of = |outer: usize| -> Vec<u32> {
            (0..outer).filter(|&inner| sets[inner].is_subset(&sets[outer])).map(|inner| inner as u32).collect()
        };
        let inside = (0..sets.len()).map(inside_of).collect();
        Ok(Self { states, inside, sets, kept, global_batch_size })
    }

    /// At least as many as states can be nested in each other.
    pub(super) fn depth(&self) -> usize {
        self.kept.len().min(self.states.len())
    }

    /// Layers of each stage, if stages end with the states `last` and `graph` is the one that the states are of.
    ///
    /// What the states leave out goes with its first reader, or else with its feeder.
    #[must_use]
    pub fn stage_layers(&self, graph: &Graph, last: &[usize]) -> Vec<Vec<usize>> {
        let nowhere = last.len();
        let mut stage_of = vec![nowhere; graph.layers.len()];
        for (stage, &state) in last.iter().enumerate().rev() {
            for position in self.sets[state].iter() {
                stage_of[self.kept[position]] = stage;
            }
        }
        for layer in (0..stage_of.len()).filter(|layer| self.kept.binary_search(layer).is_err()) {
            let readers = graph.edges.iter().filter(|edge| edge.0 == layer).map(|edge| stage_of[edge.1]);
            let feeders = graph.edges.iter().filter(|edge| edge.1 == layer).map(|edge| stage_of[edge.0]);
            let known = readers.min().filter(|&stage| stage < nowhere);
            stage_of[layer] = known.or(feeders.max().filter(|&stage| stage < nowhere)).unwrap_or(0);
        }
        let layers_of = |stage: usize| (0..stage_of.len()).filter(|&layer| stage_of[layer] == stage).collect();
        (0..last.len()).map(layers_of).collect()
    }
}

/// The graph without sources called `Input…` and then without sinks called `__getitem__…`, and the layers left.
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
    (Graph { batch_sizes: graph.batch_sizes.clone(), layers, edges, ties: Vec::new() }, kept)
}

/// A state while the antichains are walked.
struct Antichain {
    /// Its last layers; the first one describes it.
    last: Vec<usize>,
    set: BitSet,
    /// States one layer on, in the order they are met, repeats included.
    next: Vec<usize>,
}

/// Every down-set that grows from the first source, in the order of PipeDream's topological sort.
///
/// A layer joins once one of its feeders is inside; what else it needs joins with it. So a second source is never
/// alone. None if they are more than [`MOST_STATES`].
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
    // What PipeDream counts as crossing behind `layer`: all upstream that feeds anything else.
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
                    if next == MOST_STATES {
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

/// `last` once `reader` has joined through `feeder`: it takes the feeder's place, or the first, and hides its upstream.
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

/// Depth first through states sorted by description, last finished first.
fn topological_sort<'a>(found: &[Antichain], description: impl Fn(usize) -> &'a str) -> Vec<usize> {
    let by_description = |states: &[usize]| {
        let mut states = states.to_vec();
        states.sort_by_key(|&at| description(at));
        states
    };
    let mut is_marked = vec![false; found.len()];
    let mut finished = Vec::with_capacity(found.len());
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

/// Cut points where the antichains are too many: [`CutPoints`], less the empty one.
fn fallback(graph: &Graph) -> Result<(Vec<BitSet>, Vec<State>)> {
    let found = CutPoints::of(graph, MOST_STATES)?;
    let states = (1..found.len()).map(|at| {
        let mut set = BitSet::empty(graph.layers.len());
        found.layers_between(0, at).into_iter().for_each(|layer| set.insert(layer));
        let newest = found.layers_between(0, at).pop().expect("only the first state is empty");
        let output = found.totals(at, 0).boundary_bytes;
        let state = summed(graph, &set, output, &graph.layers[newest].name);
        (set, state)
    });
    Ok(states.unzip())
}

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
