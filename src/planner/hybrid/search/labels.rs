//! Labels of a pass: suffixes of the pipeline, with a dominance check among them.

use crate::planner::effort::{passes, work};
use crate::planner::hybrid::{bounds::paths::Paths, placement::placement_space::Placements};
use rustc_hash::FxHashMap;

/// A suffix of the pipeline: its stages from some cut to the model's end.
#[derive(Debug, Clone)]
pub(crate) struct Label {
    /// Lengths of critical paths through the suffix.
    pub paths: Paths,
    /// Lower bound on the step of plans that end in this suffix.
    pub bound_s: f64,
    /// Cut where the suffix begins.
    pub cut: u32,
    /// Index of the free devices that remain beside the stages of the suffix.
    pub situation: u32,
    /// Number of stages of the suffix.
    pub stages: u32,
    /// Smallest number of micro-batches in flight of the first stage.
    pub min_in_flight: u32,
    /// Largest number of micro-batches in flight of the first stage. Between the two it is undecided.
    pub max_in_flight: u32,
    /// Whether the first stage recomputes its activations.
    pub recompute: bool,
    /// Index of the label that this one extends.
    pub parent: u32,
    /// Index of the placement move that added the first stage.
    pub move_index: u32,
}

/// Labels with equal `(situations, stages, range in flight)` compete: what completes one may complete another, at the
/// same costs. More stages than micro-batches count as that many, since their numbers in flight grow no further.
type Bucket = (u32, u32, (u32, u32));

/// All labels of a pass. The indices of labels that are not dominated are in `waiting` and `complete`.
pub(crate) struct Labels {
    /// All labels in order of creation, including dominated ones, which may be parents of others.
    pub all: Vec<Label>,
    /// Indices of labels to extend, by cut.
    pub waiting: Vec<FxHashMap<Bucket, Vec<u32>>>,
    /// Indices of labels of complete plans.
    pub complete: Vec<u32>,
    micro_batches: u32,
    /// Work of comparing labels, in work units.
    pub work: u64,
}

impl Labels {
    pub(crate) fn new(cuts: usize, micro_batches: u32) -> Self {
        Self {
            all: Vec::new(),
            waiting: vec![FxHashMap::default(); cuts],
            complete: Vec::new(),
            micro_batches,
            work: 0,
        }
    }

    /// Adds a label unless a competing label dominates it, and drops competing labels that it dominates.
    pub(crate) fn add(&mut self, label: Label, space: &impl Placements) {
        let count = self.micro_batches;
        let id = self.all.len() as u32;
        // Complete labels never compete: no stage follows, so their bound is final.
        if label.cut == 0 {
            self.complete.push(id);
            self.all.push(label);
            // Truncate rarely: sorting after every plan would cost more than the memory of some extra plans.
            if self.complete.len() >= 16 * passes::PLANS_OF_PASS {
                self.keep_best_plans();
            }
            return;
        }
        let in_flight = (label.min_in_flight, label.max_in_flight);
        let rivals = self.waiting[label.cut as usize]
            .entry((space.rivals(label.situation), label.stages.min(count), in_flight))
            .or_default();
        self.work += work::COMPARE_LABELS * rivals.len() as u64;
        let dominates = |one: &Label, other: &Label| {
            one.stages <= other.stages
                && space.leaves_as_much(one.situation, other.situation)
                && one.paths.dominates(&other.paths, count)
        };
        // Equal labels dominate each other. The earlier one stays, so dominance never runs in a circle, as the proof
        // needs.
        if rivals.iter().any(|&rival| dominates(&self.all[rival as usize], &label)) {
            return;
        }
        rivals.retain(|&rival| !dominates(&label, &self.all[rival as usize]));
        rivals.push(id);
        self.all.push(label);
    }

    /// Sorts labels by their bound. Labels with equal bounds keep their order of creation, so that passes are
    /// reproducible.
    pub(crate) fn sort(&self, ids: &mut [u32]) {
        ids.sort_by(|&a, &b| self.all[a as usize].bound_s.total_cmp(&self.all[b as usize].bound_s).then(a.cmp(&b)));
    }

    /// Keeps the complete plans with the lowest bounds, at most [`passes::PLANS_OF_PASS`].
    pub(crate) fn keep_best_plans(&mut self) {
        let mut complete = std::mem::take(&mut self.complete);
        self.sort(&mut complete);
        complete.truncate(passes::PLANS_OF_PASS);
        self.complete = complete;
    }
}
