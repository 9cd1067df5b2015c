//! Memory of a stage whose activations may be recomputed.

use crate::cost::{self, LayerSums, Memory, MemoryModel, Totals};
use crate::planner::hybrid::settings::{Recompute, max_fitting_in_flight};

/// Memory of one device of a stage, with activations kept and recomputed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct StageMemory {
    kept: Memory,
    recomputed: Memory,
    choice: Recompute,
}

impl StageMemory {
    /// Returns the memory of the layers between two cuts. `totals` has the layer sums for the samples of a replica.
    pub(crate) fn new(
        model: &LayerSums,
        totals: &Totals,
        options: &MemoryModel,
        cuts: (usize, usize),
        replicas: u32,
        choice: Recompute,
    ) -> Self {
        let kept = cost::memory(model, totals, options, cuts, replicas, 1);
        Self { kept, recomputed: kept.recomputing(totals.boundary_bytes[cuts.0]), choice }
    }

    /// Returns the memory with this number of micro-batches in flight: the smaller one if both are allowed.
    pub(crate) fn least(&self, in_flight: u32) -> Memory {
        let (kept, recomputed) = (self.kept.with_in_flight(in_flight), self.recomputed.with_in_flight(in_flight));
        let is_recomputed = match self.choice {
            Recompute::Never => false,
            Recompute::Always => true,
            Recompute::ByStage => recomputed.total_bytes() < kept.total_bytes(),
        };
        if is_recomputed { recomputed } else { kept }
    }

    /// Returns the bytes of [`StageMemory::least`].
    pub(crate) fn least_bytes(&self, in_flight: u32) -> f64 {
        self.least(in_flight).total_bytes()
    }

    /// Returns the largest numbers of micro-batches in flight, up to `max`, that fit.
    pub(crate) fn fitting(&self, max: u32, capacity_bytes: f64) -> Fitting {
        let [kept, recomputed] =
            [(&self.kept, Recompute::Always), (&self.recomputed, Recompute::Never)].map(|(memory, forbidden)| {
                let fits = |in_flight| memory.bytes_with(in_flight) <= capacity_bytes;
                if self.choice == forbidden { 0 } else { max_fitting_in_flight(1, max, fits).unwrap_or(0) }
            });
        Fitting { kept, recomputed }
    }
}

/// Largest numbers of micro-batches in flight that fit a stage: 0 where none fits or the choice is not allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Fitting {
    pub kept: u32,
    pub recomputed: u32,
}

impl Fitting {
    /// Returns the larger number.
    pub(crate) fn max(self) -> u32 {
        self.kept.max(self.recomputed)
    }

    /// Returns whether a stage recomputes its activations, with a range of numbers in flight, for the choices with
    /// which it may be in the best plan. Its numbers are between `min` and `max`.
    pub(crate) fn choices(self, min: u32, max: u32) -> impl Iterator<Item = (bool, (u32, u32))> {
        let kept = self.kept.min(max);
        // Recomputation makes a stage longer, so it pays only with a number that does not fit otherwise.
        let recomputed = (min.max(kept + 1), self.recomputed.min(max));
        [(false, (min, kept)), (true, recomputed)].into_iter().filter(|(_, (least, largest))| least <= largest)
    }
}
