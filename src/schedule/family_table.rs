//! The table of schedule families: source, limits, and closed forms of bubble and memory.
//!
//! Commands, documentation and tests read this one table. Each formula appears twice: as text for readers and as a
//! function for tests. Both hold for equal stages and transfers that take no time.

use super::families::{Family, Synchronization, Uniform, VirtualStages};
use super::interleaved::Loop;
use super::one_f_one_b::{eager_in_flight, one_f_one_b, one_f_one_b_in_flight, overlapped};
use super::request::{Request, Sizes};
use super::{Schedule, bidirectional, fill_drain, v_shape, wave, zb_greedy, zero_bubble};
use crate::error::{Error, Result};

/// Default values of a row. Rows override the fields in which they differ.
const PLAIN: Family = Family {
    name: "",
    summary: "",
    source: "",
    limits: "",
    options: &[],
    virtual_stages_per_rank: VirtualStages::Exactly(1),
    chains: 1,
    splits_backward: false,
    trains: true,
    synchronization: Synchronization::Flush,
    weight_versions: "1",
    versions_of: |_| 1,
    peak: "",
    bubble: "",
    peak_of: None,
    bubble_of: None,
    accepts: |_| true,
    // Every row sets `build`. A const can't leave it out, so calling the default is a programming error.
    build: |_, _, _| unreachable!("every row has its own"),
};

/// Returns `(p - 1) (F + B)`, the bubble of every schedule that fills and drains the pipeline once.
fn fill_and_drain(sizes: Sizes, uniform: Uniform) -> f64 {
    f64::from(sizes.ranks - 1) * (uniform.forward_s + uniform.backward_s())
}

/// All schedule families, from simple to complex.
pub const FAMILIES: &[Family] = &[
    Family {
        name: "sequential",
        summary: "one micro-batch at a time through all ranks, without pipelining",
        source: "baseline for comparisons; M = 1 on one rank is plain training",
        peak: "1",
        bubble: "(p - 1) M (F + B)",
        peak_of: Some(|_, _| 1),
        // The pipeline fills and drains once for each micro-batch, not once per iteration.
        bubble_of: Some(|sizes, uniform| f64::from(sizes.micro_batches) * fill_and_drain(sizes, uniform)),
        build: |sizes, _, _| {
            let max_in_flight = vec![1; sizes.ranks as usize];
            // A limit of one micro-batch in flight makes 1F1B run one micro-batch at a time.
            Ok(named("sequential", one_f_one_b(&max_in_flight, sizes.micro_batches)))
        },
        ..PLAIN
    },
    Family {
        name: "forward_only",
        summary: "forwards only, as in inference",
        source: "pipelined inference, for instance PipeEdge (Hu et al., 2022)",
        trains: false,
        peak: "1",
        bubble: "(p - 1) F",
        peak_of: Some(|_, _| 1),
        bubble_of: Some(|sizes, uniform| f64::from(sizes.ranks - 1) * uniform.forward_s),
        build: |sizes, _, _| Ok(fill_drain::forward_only("forward_only", sizes.ranks, sizes.micro_batches)),
        ..PLAIN
    },
    Family {
        name: "staggered",
        summary: "forwards in lock-step: in step t, stage s works on micro-batch t - s",
        source: "systolic pipelines (Kung, 1982)",
        trains: false,
        synchronization: Synchronization::LockStep,
        peak: "1",
        bubble: "(p - 1) F",
        peak_of: Some(|_, _| 1),
        bubble_of: Some(|sizes, uniform| f64::from(sizes.ranks - 1) * uniform.forward_s),
        build: |sizes, _, _| Ok(fill_drain::forward_only("staggered", sizes.ranks, sizes.micro_batches)),
        ..PLAIN
    },
    Family {
        name: "gpipe",
        summary: "all forwards, then all backwards",
        source: "GPipe (Huang et al., 2019)",
        peak: "M",
        bubble: "(p - 1) (F + B)",
        peak_of: Some(|sizes, _| sizes.micro_batches),
        bubble_of: Some(fill_and_drain),
        build: |sizes, _, _| Ok(fill_drain::gpipe(sizes.ranks, sizes.micro_batches)),
        ..PLAIN
    },
    Family {
        name: "1f1b",
        summary: "a warm-up of forwards, then a backward for each forward",
        source: "PipeDream-Flush (Narayanan et al., 2021); DAPPLE (Fan et al., 2021), policy PA",
        options: &["activation_limit", "max_in_flight"],
        peak: "min(M, p - r, activation_limit)",
        bubble: "(p - 1) (F + B)",
        peak_of: Some(|sizes, rank| sizes.micro_batches.min(sizes.ranks - rank).min(sizes.activation_limit)),
        bubble_of: Some(fill_and_drain),
        build: |sizes, request, _| with_in_flight_limits(sizes, request, "1f1b", one_f_one_b_in_flight),
        ..PLAIN
    },
    Family {
        name: "eager_1f1b",
        summary: "1F1B with a warm-up nearly twice as long, which hides transfers",
        source: "DAPPLE (Fan et al., 2021), policy PB",
        options: &["activation_limit", "max_in_flight"],
        peak: "min(M, 2 (p - r) - 1, activation_limit)",
        bubble: "(p - 1) (F + B)",
        peak_of: Some(|sizes, rank| sizes.micro_batches.min(2 * (sizes.ranks - rank) - 1).min(sizes.activation_limit)),
        bubble_of: Some(fill_and_drain),
        build: |sizes, request, _| with_in_flight_limits(sizes, request, "eager_1f1b", eager_in_flight),
        ..PLAIN
    },
    Family {
        name: "1f1b_overlap",
        summary: "1F1B whose steady state runs a forward and a backward as one, which hides the expert all-to-all",
        source: "Megatron-LM, combined 1F1B; DeepSeek-V3 (2024) for the fused pair",
        peak: "min(M, 2 (p - r))",
        bubble: "(p - 1) (F + B) on the last rank",
        peak_of: Some(|sizes, rank| sizes.micro_batches.min(2 * (sizes.ranks - rank))),
        bubble_of: Some(fill_and_drain),
        build: |sizes, _, _| Ok(overlapped(sizes.ranks, sizes.micro_batches)),
        ..PLAIN
    },
    Family {
        name: "pipedream",
        summary: "1F1B without a flush: a backward uses the weights of its own forward",
        source: "PipeDream (Narayanan et al., 2019)",
        options: &["max_in_flight"],
        synchronization: Synchronization::Asynchronous,
        weight_versions: "min(M, p - r)",
        // Each micro-batch in flight keeps the weights that its forward pass used.
        versions_of: |in_flight| in_flight,
        peak: "min(M, p - r)",
        bubble: "0 in the steady state",
        peak_of: Some(|sizes, rank| sizes.micro_batches.min(sizes.ranks - rank)),
        build: |sizes, request, _| with_in_flight_limits(sizes, request, "pipedream", one_f_one_b_in_flight),
        ..PLAIN
    },
    Family {
        name: "pipedream_2bw",
        summary: "1F1B without a flush and with two versions of the weights",
        source: "PipeDream-2BW (Narayanan et al., 2021)",
        options: &["max_in_flight"],
        synchronization: Synchronization::Asynchronous,
        weight_versions: "2",
        versions_of: |_| 2,
        peak: "min(M, p - r)",
        bubble: "0 in the steady state",
        peak_of: Some(|sizes, rank| sizes.micro_batches.min(sizes.ranks - rank)),
        build: |sizes, request, _| with_in_flight_limits(sizes, request, "pipedream_2bw", one_f_one_b_in_flight),
        ..PLAIN
    },
    Family {
        name: "pipemare",
        summary: "1F1B without a flush and with one weight version, which changes between a forward and its backward",
        source: "PipeMare (Yang et al., 2021)",
        options: &["max_in_flight"],
        synchronization: Synchronization::Asynchronous,
        peak: "min(M, p - r)",
        bubble: "0 in the steady state",
        peak_of: Some(|sizes, rank| sizes.micro_batches.min(sizes.ranks - rank)),
        build: |sizes, request, _| with_in_flight_limits(sizes, request, "pipemare", one_f_one_b_in_flight),
        ..PLAIN
    },
    Family {
        name: "interleaved",
        summary: "1F1B with several virtual stages per rank, in groups of micro-batches",
        source: "Megatron-LM (Narayanan et al., 2021)",
        limits: IN_GROUPS,
        options: &["virtual_stages_per_rank", "group_size"],
        accepts: Sizes::are_in_groups,
        virtual_stages_per_rank: VirtualStages::Several,
        peak: "min(v M, (v - 1) g + 2 (p - r - 1) + 1)",
        bubble: "(p - 1) (F + B) if g = p",
        peak_of: Some(|sizes, rank| {
            let Sizes { ranks: p, virtual_stages_per_rank: v, micro_batches: m, group_size: g, .. } = sizes;
            (v * m).min((v - 1) * g + 2 * (p - rank - 1) + 1)
        }),
        bubble_of: Some(fill_and_drain),
        build: |sizes, _, _| Ok(looped(sizes).interleaved()),
        ..PLAIN
    },
    Family {
        name: "interleaved_overlap",
        summary: "interleaved 1F1B whose steady state runs a forward and a backward as one",
        source: "Megatron-LM, combined 1F1B",
        limits: IN_GROUPS,
        options: &["virtual_stages_per_rank", "group_size"],
        accepts: Sizes::are_in_groups,
        virtual_stages_per_rank: VirtualStages::Several,
        peak: "min(v M, (v - 1) g + 2 (p - r))",
        bubble: "(p - 1) (F + B) on the last rank if g = p",
        bubble_of: Some(fill_and_drain),
        peak_of: Some(|sizes, rank| {
            let Sizes { ranks: p, virtual_stages_per_rank: v, micro_batches: m, group_size: g, .. } = sizes;
            (v * m).min((v - 1) * g + 2 * (p - rank))
        }),
        build: |sizes, _, _| Ok(looped(sizes).interleaved_overlap()),
        ..PLAIN
    },
    Family {
        name: "looped_bfs",
        summary: "all forwards of a virtual stage before those of the next, backwards in reverse",
        source: "Breadth-first pipeline parallelism (Lamy-Poirier, 2023)",
        options: &["virtual_stages_per_rank"],
        virtual_stages_per_rank: VirtualStages::Several,
        peak: "v M",
        bubble: "(p - 1) (F + B) if M >= p",
        peak_of: Some(|sizes, _| sizes.virtual_stages_per_rank * sizes.micro_batches),
        bubble_of: Some(fill_and_drain),
        build: |sizes, _, _| {
            Ok(fill_drain::looped_breadth_first(sizes.ranks, sizes.virtual_stages_per_rank, sizes.micro_batches))
        },
        ..PLAIN
    },
    Family {
        name: "hanayo",
        summary: "waves down and up the ranks, with two virtual stages per rank for each wave",
        source: "Hanayo (Liu et al., 2023)",
        options: &["virtual_stages_per_rank", "activation_limit"],
        virtual_stages_per_rank: VirtualStages::Even,
        peak: "at most v p, or activation_limit",
        bubble: "about 1.4 (p - 1) (F + B) if M = p; a limit of 2 v p keeps it near that for more micro-batches",
        build: |sizes, request, _| {
            let Sizes { ranks, virtual_stages_per_rank, micro_batches, .. } = sizes;
            // Each micro-batch in flight may hold one activation per virtual stage of the rank, so an activation limit
            // limits the micro-batches in flight to `activation_limit / virtual_stages_per_rank`.
            let under_way =
                request.activation_limit.map_or(ranks, |activation_limit| activation_limit / virtual_stages_per_rank);
            if under_way == 0 {
                return Err(Error::argument(
                    format!(
                        "`activation_limit` is {}, but one micro-batch in flight holds \
                         {virtual_stages_per_rank} virtual stages of a rank",
                        sizes.activation_limit
                    ),
                    format!("set it to {virtual_stages_per_rank} or more"),
                ));
            }
            Ok(wave::hanayo(ranks, virtual_stages_per_rank, micro_batches, under_way))
        },
        ..PLAIN
    },
    Family {
        name: "zb_h1",
        summary: "1F1B whose weight gradients fill part of the bubble, with 1F1B's memory",
        source: "Zero bubble pipeline parallelism (Qi et al., 2023), ZB-H1",
        splits_backward: true,
        peak: "min(M, p)",
        bubble: "(p - 1) (F + I - W)",
        peak_of: Some(|sizes, _| sizes.micro_batches.min(sizes.ranks)),
        bubble_of: Some(|sizes, uniform| {
            f64::from(sizes.ranks - 1) * (uniform.forward_s + uniform.input_gradient_s - uniform.weight_gradient_s)
        }),
        build: |sizes, _, _| Ok(looped(sizes).zero_bubble("zb_h1")),
        ..PLAIN
    },
    Family {
        name: "zb_h2",
        summary: "split backwards and twice 1F1B's memory: no bubble inside a rank",
        source: "Zero bubble pipeline parallelism (Qi et al., 2023), ZB-H2",
        splits_backward: true,
        peak: "min(M, 2 p - 1)",
        bubble: "(p - 1) F if M >= p; none inside a rank if M >= 2 p - 1",
        peak_of: Some(|sizes, _| sizes.micro_batches.min(2 * sizes.ranks - 1)),
        bubble_of: Some(|sizes, uniform| f64::from(sizes.ranks - 1) * uniform.forward_s),
        build: |sizes, _, _| Ok(zero_bubble::zb_h2(sizes.ranks, sizes.micro_batches)),
        ..PLAIN
    },
    Family {
        name: "zb",
        summary: "weight gradients fill gaps greedily, under any activation limit and for uneven stages",
        source: "Zero bubble pipeline parallelism (Qi et al., 2023), section 3.1",
        options: &["activation_limit", "durations"],
        splits_backward: true,
        peak: "at most activation_limit, 2 p if not given",
        bubble: "found by search; (p - 1) F with a limit of 2 p",
        build: |sizes, request, control| {
            // With 2 p activations, the search reaches ZB-H2's bubble of (p - 1) F on equal stages.
            let activation_limit = request.activation_limit.unwrap_or(2 * sizes.ranks);
            zb_greedy::zb(sizes.ranks, sizes.micro_batches, activation_limit, &request.durations(sizes)?, control)
        },
        ..PLAIN
    },
    Family {
        name: "interleaved_zb",
        summary: "interleaved 1F1B with split backwards",
        source: "PyTorch, ScheduleInterleavedZeroBubble, after Qi et al. (2023)",
        limits: IN_GROUPS,
        options: &["virtual_stages_per_rank", "group_size"],
        accepts: Sizes::are_in_groups,
        virtual_stages_per_rank: VirtualStages::Several,
        splits_backward: true,
        peak: "min(v M, (v - 1) g + p)",
        bubble: "(p - 1) F if g = p",
        peak_of: Some(|sizes, _| {
            let Sizes { ranks: p, virtual_stages_per_rank: v, micro_batches: m, group_size: g, .. } = sizes;
            (v * m).min((v - 1) * g + p)
        }),
        bubble_of: Some(|sizes, uniform| f64::from(sizes.ranks - 1) * uniform.forward_s),
        build: |sizes, _, _| Ok(looped(sizes).zero_bubble("interleaved_zb")),
        ..PLAIN
    },
    Family {
        name: "zb_v",
        summary: "split backwards on a V: no bubble inside a rank, with 1F1B's memory",
        source: "Pipeline parallelism with controllable memory (Qi et al., 2024), ZB-V",
        options: &["durations"],
        virtual_stages_per_rank: VirtualStages::Exactly(2),
        splits_backward: true,
        peak: "min(2 M, 2 p)",
        bubble: "(p - 1) F",
        peak_of: Some(|sizes, _| 2 * sizes.micro_batches.min(sizes.ranks)),
        bubble_of: Some(|sizes, uniform| f64::from(sizes.ranks - 1) * uniform.forward_s),
        build: |sizes, request, control| match request.durations {
            // Without durations, return exactly the order that PyTorch runs, which assumes equal F, I and W.
            None => Ok(v_shape::zb_v(sizes.ranks, sizes.micro_batches)),
            Some(_) => v_shape::zb_v_fitted(sizes.ranks, sizes.micro_batches, &request.durations(sizes)?, control),
        },
        ..PLAIN
    },
    Family {
        name: "v_half",
        summary: "split backwards on a V with half of 1F1B's memory",
        source: "Pipeline parallelism with controllable memory (Qi et al., 2024), V-Half",
        options: &["durations"],
        virtual_stages_per_rank: VirtualStages::Exactly(2),
        splits_backward: true,
        peak: "at most 2 ⌊(p + 2) / 2⌋",
        bubble: "found by squeezing repeated blocks",
        build: |sizes, request, control| {
            v_shape::v_half(sizes.ranks, sizes.micro_batches, &request.durations(sizes)?, control)
        },
        ..PLAIN
    },
    Family {
        name: "v_min",
        summary: "split backwards on a V with a third of 1F1B's memory",
        source: "Pipeline parallelism with controllable memory (Qi et al., 2024), V-Min",
        options: &["durations"],
        virtual_stages_per_rank: VirtualStages::Exactly(2),
        splits_backward: true,
        peak: "at most 2 ⌊(p + 4) / 3⌋",
        bubble: "found by squeezing repeated blocks",
        build: |sizes, request, control| {
            v_shape::v_min(sizes.ranks, sizes.micro_batches, &request.durations(sizes)?, control)
        },
        ..PLAIN
    },
    Family {
        name: "dualpipe",
        summary: "micro-batches from both ends, forwards fused with the other direction's backwards",
        source: "DeepSeek-V3 (2024), DualPipe",
        limits: "p even, M even and at least 2 p",
        chains: 2,
        splits_backward: true,
        peak: "p + 1",
        bubble: "(p / 2 - 1) (F‖B + B - 3 W)",
        peak_of: Some(|sizes, _| sizes.ranks + 1),
        bubble_of: Some(|sizes, uniform| dual_bubble(sizes.ranks / 2 - 1, uniform)),
        accepts: |sizes| {
            let Sizes { ranks: p, micro_batches: m, .. } = sizes;
            // Ranks and micro-batches are split into two directions. The steady state needs p micro-batches in each.
            p.is_multiple_of(2) && m.is_multiple_of(2) && m >= 2 * p
        },
        build: |sizes, _, _| Ok(bidirectional::dualpipe(sizes.ranks, sizes.micro_batches)),
        ..PLAIN
    },
    Family {
        name: "dualpipe_v",
        summary: "DualPipe folded into a V: one copy of the weights",
        source: "DualPipeV, cut in half from DualPipe (Sea AI Lab, 2025)",
        limits: "M at least 2 p",
        virtual_stages_per_rank: VirtualStages::Exactly(2),
        splits_backward: true,
        peak: "2 p + 1",
        bubble: "(p - 1) (F‖B + B - 3 W)",
        peak_of: Some(|sizes, _| 2 * sizes.ranks + 1),
        bubble_of: Some(|sizes, uniform| dual_bubble(sizes.ranks - 1, uniform)),
        accepts: |sizes| sizes.micro_batches >= 2 * sizes.ranks,
        build: |sizes, _, _| Ok(bidirectional::dualpipe_v(sizes.ranks, sizes.micro_batches)),
        ..PLAIN
    },
    Family {
        name: "chimera",
        summary: "units of p micro-batches, half of them from either end",
        source: "Chimera (Li & Hoefler, 2021), direct concatenation",
        limits: "p even, M a multiple of p",
        chains: 2,
        peak: "min(p, p / 2 + 1 + the distance to the nearer end)",
        peak_of: Some(|sizes, rank| sizes.ranks.min(sizes.ranks / 2 + 1 + rank.min(sizes.ranks - 1 - rank))),
        bubble: "(p / 2 - 1) (F + B) if M = p and F = B",
        accepts: |sizes| sizes.ranks.is_multiple_of(2) && sizes.micro_batches.is_multiple_of(sizes.ranks),
        build: |sizes, _, _| Ok(bidirectional::chimera(sizes.ranks, sizes.micro_batches)),
        ..PLAIN
    },
];

const IN_GROUPS: &str = "M a multiple of g, or a last group of at least p; g at least p or all of M";

/// Returns `factor (F‖B + B - 3 W)`, the bubble of `DualPipe` for a factor that depends on the number of ranks.
fn dual_bubble(factor: u32, uniform: Uniform) -> f64 {
    f64::from(factor) * (uniform.overlapped_s + uniform.backward_s() - 3.0 * uniform.weight_gradient_s)
}

fn looped(sizes: Sizes) -> Loop {
    let Sizes { ranks, virtual_stages_per_rank, micro_batches, group_size, .. } = sizes;
    Loop { ranks, virtual_stages_per_rank, group_size, micro_batches }
}

fn named(name: &str, schedule: Schedule) -> Schedule {
    Schedule { name: name.to_owned(), ..schedule }
}

fn with_in_flight_limits(
    sizes: Sizes,
    request: &Request,
    name: &str,
    default_limits: fn(u32, u32, u32) -> Vec<u32>,
) -> Result<Schedule> {
    let max_in_flight = match request.max_in_flight(sizes)? {
        Some(max_in_flight) => max_in_flight,
        None => default_limits(sizes.ranks, sizes.micro_batches, sizes.activation_limit),
    };
    Ok(named(name, one_f_one_b(&max_in_flight, sizes.micro_batches)))
}
