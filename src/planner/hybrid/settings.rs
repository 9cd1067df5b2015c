//! Settings of the search that the caller chooses.

use crate::cost::MemoryModel;
use crate::error::{Error, Result};

/// Number of forward passes that a stage runs before its first backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WarmUp {
    /// Runs all forward passes first, as in GPipe.
    All,
    /// Runs one for each stage from this one to the last: 1F1B, policy PA of DAPPLE.
    Min,
    /// Runs from that number up to `2 (S - s) - 1`, as memory allows: eager 1F1B, policy PB of DAPPLE.
    Eager,
}

/// Stages that recompute their activations in their backward passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recompute {
    /// No stage.
    Never,
    /// Every stage.
    Always,
    /// Any stages. With equal numbers in flight, only those that do not fit otherwise (docs/proofs.md#recomputation).
    ByStage,
}

impl Recompute {
    /// Returns the choices of a single stage.
    #[must_use]
    pub fn of_stage(self) -> &'static [bool] {
        match self {
            Self::Never => &[false],
            Self::Always => &[true],
            Self::ByStage => &[false, true],
        }
    }

    /// Returns the smallest number of forwards of a stage for each micro-batch, as a factor.
    #[must_use]
    pub fn min_forwards(self) -> f64 {
        if self == Self::Always { 2.0 } else { 1.0 }
    }

    /// Returns the choice of plans whose stages all recompute, or all keep their activations.
    #[must_use]
    pub fn uniform(recompute: bool) -> Self {
        if recompute { Self::Always } else { Self::Never }
    }
}

/// A planning problem, without model and cluster.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "they are independent choices of the caller")]
pub struct Settings {
    /// Samples of one training step.
    pub global_batch: u32,
    /// Micro-batch sizes to choose from, in samples over all replicas. Each divides `global_batch`.
    pub pipeline_micro_batch_sizes: Vec<u32>,
    /// Smallest number of samples of a micro-batch that a replica may get. The profile has no reliable times below it.
    pub min_samples_per_replica: u32,
    /// Whether replicas of a stage may get shares that differ by one sample.
    pub uneven_shares: bool,
    /// Whether replicas of different speed get shares by their speed. Only [`super::PlanEvaluator`] knows these shares:
    /// bounds of the search hold for even ones.
    pub shares_by_speed: bool,
    /// Whether the gradient all-reduce may start before the backward pass has ended.
    pub overlap_sync: bool,
    /// Whether a stage computes while its transfers are on the links. Otherwise each of its passes takes them as well.
    pub overlap_p2p_comm: bool,
    /// Allowed choices of activation recomputation.
    pub recompute: Vec<Recompute>,
    /// Warm-up of the schedule.
    pub warm_up: WarmUp,
    /// Memory that weights imply on a device, and memory that stays reserved.
    pub memory: MemoryModel,
    /// Largest number of stages.
    pub max_stages: u32,
    /// Largest number of replicas of a stage.
    pub max_replicas: u32,
    /// Whether all stages have the same number of replicas.
    pub equal_replicas: bool,
}

impl Settings {
    /// Checks that micro-batch sizes divide the global batch and that all limits and factors are usable.
    ///
    /// # Errors
    /// Returns [`Error::Argument`] that names the argument and its value.
    pub fn check(&self) -> Result<()> {
        if self.global_batch == 0 {
            return Err(Error::argument(
                "the global batch size is 0, but it must be at least 1",
                "set it to 1 or more",
            ));
        }
        for &micro_batch in &self.pipeline_micro_batch_sizes {
            if micro_batch == 0 || !self.global_batch.is_multiple_of(micro_batch) {
                return Err(Error::argument(
                    format!("micro-batch size {micro_batch} does not divide global batch size {}", self.global_batch),
                    "choose a divisor, or leave the micro-batch size to the planner",
                ));
            }
        }
        if self.min_samples_per_replica == 0 {
            return Err(Error::argument(
                "min_samples_per_replica is 0, but it must be at least 1",
                "set it to 1 or more",
            ));
        }
        if self.max_stages == 0 {
            return Err(Error::argument(
                "the maximum number of stages is 0, but a plan has at least one stage",
                "set it to 1 or more",
            ));
        }
        let memory = &self.memory;
        for (name, value) in [
            ("gradients per weight", memory.gradients_per_weight),
            ("optimizer state per weight", memory.optimizer_per_weight),
            ("reserved memory", memory.reserved_bytes),
        ] {
            // The negated comparison also rejects NaN.
            if !(value >= 0.0 && value.is_finite()) {
                return Err(Error::argument(
                    format!("{name} is {value}, but it must be a number of at least 0"),
                    "set it to 0 or more",
                ));
            }
        }
        if memory.zero_stage > memory.max_zero_stage || memory.max_zero_stage > 3 {
            return Err(Error::argument(
                format!(
                    "ZeRO stages go from {} to {}, but they must rise and be at most 3",
                    memory.zero_stage, memory.max_zero_stage
                ),
                "choose 0, 1, 2 or 3",
            ));
        }
        // Neither of recomputation and a higher ZeRO stage is always faster, so no stage could decide on both by itself.
        if memory.zero_stage < memory.max_zero_stage && self.recompute.contains(&Recompute::ByStage) {
            return Err(Error::argument(
                "each stage would choose its ZeRO stage and whether it recomputes its activations",
                "leave one of them to the stages",
            ));
        }
        Ok(())
    }

    /// Returns the values of recomputation that all stages may have together.
    #[must_use]
    pub fn uniform_recompute(&self) -> Vec<bool> {
        let allows = |value: &bool| self.recompute.iter().any(|choice| choice.of_stage().contains(value));
        [false, true].into_iter().filter(allows).collect()
    }

    /// Returns the largest number of samples of a micro-batch that one of `replicas` gets, or `None` if that split is
    /// not allowed.
    #[must_use]
    pub fn samples_per_replica(&self, micro_batch: u32, replicas: u32) -> Option<u32> {
        // The largest number decides times and memory, but the smallest one (rounded down) must have reliable times.
        let even = micro_batch.is_multiple_of(replicas);
        let enough = micro_batch / replicas >= self.min_samples_per_replica && replicas <= self.max_replicas;
        ((even || self.uneven_shares) && enough).then(|| micro_batch.div_ceil(replicas))
    }

    /// Returns the time by which transfers lengthen each pass of a stage that receives and sends for these times.
    #[must_use]
    pub fn exposed_transfer_s(&self, receive_s: f64, send_s: f64) -> f64 {
        // The backward sends and receives gradients of the same bytes, so both passes are lengthened alike.
        if self.overlap_p2p_comm { 0.0 } else { receive_s + send_s }
    }

    /// Returns the smallest and the largest number of micro-batches in flight of a stage. `from_end` is 1 for the last
    /// one.
    #[must_use]
    pub fn max_in_flights(&self, from_end: u32, micro_batches: u32) -> (u32, u32) {
        match self.warm_up {
            WarmUp::All => (micro_batches, micro_batches),
            WarmUp::Min => (from_end.min(micro_batches), from_end.min(micro_batches)),
            // With 2 (S - s) - 1 in flight, a stage covers a round trip of messages as long as its own compute time
            // (DAPPLE).
            WarmUp::Eager => (from_end.min(micro_batches), (2 * from_end - 1).min(micro_batches)),
        }
    }
}

/// Returns the largest number from `min` to `max` that fits, or `None` if `min` does not fit.
///
/// `fits` must be monotone: if a number fits, all smaller ones do.
pub(crate) fn max_fitting_in_flight(min: u32, max: u32, fits: impl Fn(u32) -> bool) -> Option<u32> {
    // Test the largest number first: if it fits, no bisection is needed.
    if fits(max) {
        return Some(max);
    }
    if !fits(min) {
        return None;
    }
    let (mut low, mut high) = (min, max);
    while high - low > 1 {
        let middle = low.midpoint(high);
        if fits(middle) { low = middle } else { high = middle }
    }
    Some(low)
}
