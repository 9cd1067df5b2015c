//! Where a model may be cut: the down-sets of its layer graph, with what lies inside and what crosses the edge.
//!
//! A cut puts some layers before it and the rest behind it, and no edge may lead back: what lies before a cut is a
//! *down-set* (order ideal) of the graph, which PipeDream calls an antichain state. Stages are differences of nested
//! down-sets. A chain has as many as layers; a branching graph may have astronomically many, so
//!
//! 1. layers that cost nothing follow a neighbour where that can't make a cut dearer (`units`);
//! 2. all down-sets of what is left are listed, up to a bound (`walk::all`);
//! 3. beyond the bound one good linear order takes their place (`walk::best_order`), and [`Cuts`] says so.

mod set;
mod units;
mod walk;

pub(crate) use set::Set;

use crate::error::{Error, Result};
use crate::model::graph::Graph;
use units::Unit;

/// Down-sets that [`States::of`] lists before it falls back to one order, unless told otherwise.
pub const DEFAULT_BOUND: usize = 10_000;

/// Whether a set of states holds every useful cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cuts {
    /// Every down-set, but for layers that cost no time and hold no parameters: those follow a neighbour.
    Exact,
    /// The prefixes of one topological order: a plan is optimal for that order only.
    LinearOrder {
        /// Why, for the report.
        why: String,
    },
}

/// Sums over the layers of one down-set, at one of the profile's batch sizes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CutTotals {
    /// Forward seconds.
    pub forward_s: f64,
    /// Backward seconds.
    pub backward_s: f64,
    /// Bytes of weights.
    pub parameter_bytes: f64,
    /// Bytes kept from forward to backward.
    pub saved_bytes: f64,
    /// Outputs that layers outside read: what crosses the cut behind this down-set.
    pub boundary_bytes: f64,
}

/// The cut points of a graph. State 0 is empty and the last one holds every layer; a state comes after all its subsets.
#[derive(Debug, Clone, PartialEq)]
pub struct States {
    cuts: Cuts,
    /// Layers in topological order; bit k of a set stands for `order[k]`.
    order: Vec<usize>,
    sets: Vec<Set>,
    /// `totals[state * batch_sizes + batch]`.
    totals: Vec<CutTotals>,
    batch_sizes: usize,
    units: Vec<Unit>,
}

impl States {
    /// The cut points of `graph`: all down-sets if they are at most `bound`, else the best single order found.
    ///
    /// # Errors
    /// [`Error::Profile`] if the graph has no layers, has a cycle, or numbers that are not finite and positive.
    ///
    /// ```
    /// use hpgo::model::graph::{Graph, Layer, Measurement};
    /// use hpgo::model::states::{DEFAULT_BOUND, States};
    ///
    /// let measured = vec![Measurement { forward_s: 1.0, activation_bytes: 8.0, ..Measurement::default() }];
    /// let layer = Layer { name: "linear".into(), parameter_bytes: 4.0, measured };
    /// let graph = Graph { batch_sizes: vec![1], layers: vec![layer; 3], edges: vec![(0, 1), (1, 2)] };
    /// let states = States::of(&graph, DEFAULT_BOUND)?;
    /// assert_eq!(states.len(), 4); // nothing, one, two, all three layers
    /// assert_eq!(states.totals(2, 0).boundary_bytes, 8.0);
    /// assert_eq!(states.layers_between(1, 3), [1, 2]);
    /// # Ok::<(), hpgo::Error>(())
    /// ```
    pub fn of(graph: &Graph, bound: usize) -> Result<Self> {
        graph.check()?;
        if graph.layers.is_empty() {
            return Err(Error::profile("the profile has no layers", "a profile needs at least one layer"));
        }
        let order = graph.topological_order()?;
        let wires = Wires::of(graph, &order);
        let units = units::of(graph, &order, &wires);
        if let Some(sets) = walk::all(&units, order.len(), bound) {
            return Ok(Self::with(graph, order, &wires, units, sets, Cuts::Exact));
        }
        let sets = walk::best_order(graph, &order, &wires, &units);
        let why = format!(
            "the graph has more than {bound} cut points; plans use the {} of one order of its layers",
            sets.len()
        );
        Ok(Self::with(graph, order, &wires, units, sets, Cuts::LinearOrder { why }))
    }

    /// The states at which stages may end, each given as all layers before it; before them the empty one, behind them the
    /// full one.
    ///
    /// # Errors
    /// As [`States::between`].
    pub fn ending_at(graph: &Graph, ends: &[Vec<usize>]) -> Result<Self> {
        let layers = graph.layers.len();
        let mut passed = vec![false; layers];
        let mut stages = Vec::with_capacity(ends.len() + 1);
        for end in ends.iter().cloned().chain([(0..layers).collect()]) {
            // A layer that there isn't is left for `between` to name.
            let is_new = |&layer: &usize| !passed.get(layer).copied().unwrap_or(false);
            let stage: Vec<usize> = end.into_iter().filter(is_new).collect();
            for &layer in &stage {
                if let Some(known) = passed.get_mut(layer) {
                    *known = true;
                }
            }
            stages.push(stage);
        }
        Self::between(graph, &stages)
    }

    /// The cut points between given stages, first stage first: lists of layer indices that together hold every layer once.
    ///
    /// # Errors
    /// [`Error::Profile`] if the graph is not usable, [`Error::Argument`] if a layer is missing, unknown or repeated, or
    /// feeds a layer of an earlier stage.
    pub fn between(graph: &Graph, stages: &[Vec<usize>]) -> Result<Self> {
        graph.check()?;
        let order = graph.topological_order()?;
        let mut stage_of = vec![None; order.len()];
        for (stage, layers) in stages.iter().enumerate() {
            for &layer in layers {
                let known = stage_of.get_mut(layer).ok_or_else(|| {
                    Error::argument(
                        format!("stage {stage} names layer {layer}, but there are {} layers", order.len()),
                        "layers are numbered from 0",
                    )
                })?;
                if let Some(other) = known.replace(stage) {
                    let name = &graph.layers[layer].name;
                    return Err(Error::argument(
                        if other == stage {
                            format!("stage {stage} names layer `{name}` twice")
                        } else {
                            format!("layer `{name}` is in stage {other} and in stage {stage}")
                        },
                        "each layer belongs to one stage, once",
                    ));
                }
            }
            if layers.is_empty() {
                return Err(Error::argument(format!("stage {stage} has no layers"), "leave it out"));
            }
        }
        if let Some(layer) = stage_of.iter().position(Option::is_none) {
            let name = &graph.layers[layer].name;
            return Err(Error::argument(format!("layer `{name}` is in no stage"), "each layer belongs to one stage"));
        }
        if let Some(&(from, to)) = graph.edges.iter().find(|&&(from, to)| stage_of[from] > stage_of[to]) {
            return Err(Error::argument(
                format!(
                    "layer `{}` feeds layer `{}` of an earlier stage",
                    graph.layers[from].name, graph.layers[to].name
                ),
                "data flows from each stage to later ones only",
            ));
        }
        let wires = Wires::of(graph, &order);
        let sets = (0..=stages.len())
            .map(|cut| {
                let mut set = Set::empty(order.len());
                (0..order.len()).filter(|&at| stage_of[order[at]] < Some(cut)).for_each(|at| set.insert(at));
                set
            })
            .collect();
        Ok(Self::with(graph, order, &wires, Vec::new(), sets, Cuts::Exact))
    }

    fn with(graph: &Graph, order: Vec<usize>, wires: &Wires, units: Vec<Unit>, sets: Vec<Set>, cuts: Cuts) -> Self {
        let batch_sizes = graph.batch_sizes.len();
        let mut totals = Vec::with_capacity(sets.len() * batch_sizes);
        for set in &sets {
            for batch in 0..batch_sizes {
                let mut sum = CutTotals::default();
                for position in set.iter() {
                    let layer = &graph.layers[order[position]];
                    let measured = &layer.measured[batch];
                    sum.forward_s += measured.forward_s;
                    sum.backward_s += measured.backward_s;
                    sum.parameter_bytes += layer.parameter_bytes;
                    sum.saved_bytes += measured.saved_bytes;
                    if wires.crosses(position, set) {
                        sum.boundary_bytes += measured.activation_bytes;
                    }
                }
                totals.push(sum);
            }
        }
        Self { cuts, order, sets, totals, batch_sizes, units }
    }

    /// Whether these are all cut points or one order's.
    #[must_use]
    pub fn cuts(&self) -> &Cuts {
        &self.cuts
    }

    /// Number of states, the empty and the full one included.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "there are always at least two")]
    pub fn len(&self) -> usize {
        self.sets.len()
    }

    /// Layers of the graph in the topological order used here.
    #[must_use]
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// Sums over the layers of `state`, at the profile's batch size with index `batch`.
    #[must_use]
    pub fn totals(&self, state: usize, batch: usize) -> &CutTotals {
        &self.totals[state * self.batch_sizes + batch]
    }

    /// Whether every layer of `inner` is in `outer`; states need be compared only where `inner <= outer`.
    #[must_use]
    pub fn is_subset(&self, inner: usize, outer: usize) -> bool {
        self.sets[inner].is_subset(&self.sets[outer])
    }

    /// Layers of `outer` that are not in `inner`, in topological order: a stage, if `inner` is a subset.
    #[must_use]
    pub fn layers_between(&self, inner: usize, outer: usize) -> Vec<usize> {
        self.sets[outer]
            .iter()
            .filter(|&position| !self.sets[inner].contains(position))
            .map(|position| self.order[position])
            .collect()
    }

    /// Whether the states are nested in each other, so that any two of them bound a stage.
    #[must_use]
    pub fn is_linear(&self) -> bool {
        (1..self.len()).all(|state| self.is_subset(state - 1, state))
    }

    /// The best single order: nested states from empty to full whose boundaries are smallest in sum.
    ///
    /// Numbers of states differ from those of `self`; [`Cuts::Exact`] stays only where nothing is lost.
    #[must_use]
    pub fn linear(&self) -> Self {
        if self.is_linear() {
            return self.clone();
        }
        let chain = walk::shortest_chain(&self.sets, &self.units, |state| self.totals(state, 0).boundary_bytes);
        let why = format!("one order of the layers: {} of {} cut points", chain.len(), self.len());
        Self {
            cuts: Cuts::LinearOrder { why },
            order: self.order.clone(),
            sets: chain.iter().map(|&state| self.sets[state].clone()).collect(),
            totals: chain
                .iter()
                .flat_map(|&state| &self.totals[state * self.batch_sizes..(state + 1) * self.batch_sizes])
                .copied()
                .collect(),
            batch_sizes: self.batch_sizes,
            units: self.units.clone(),
        }
    }
}

/// Who reads whose output, by position in the topological order, each neighbour once.
#[derive(Debug)]
pub(crate) struct Wires {
    pub(crate) before: Vec<Vec<usize>>,
    pub(crate) after: Vec<Vec<usize>>,
}

impl Wires {
    fn of(graph: &Graph, order: &[usize]) -> Self {
        let mut position = vec![0; order.len()];
        for (at, &layer) in order.iter().enumerate() {
            position[layer] = at;
        }
        let mut wires = Self { before: vec![Vec::new(); order.len()], after: vec![Vec::new(); order.len()] };
        for &(from, to) in &graph.edges {
            wires.after[position[from]].push(position[to]);
            wires.before[position[to]].push(position[from]);
        }
        for ends in wires.before.iter_mut().chain(&mut wires.after) {
            ends.sort_unstable();
            ends.dedup();
        }
        wires
    }

    /// Whether a layer outside `set` reads what the layer at `position` puts out.
    fn crosses(&self, position: usize, set: &Set) -> bool {
        self.after[position].iter().any(|&reader| !set.contains(reader))
    }
}
