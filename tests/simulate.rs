//! The simulator against closed forms, laws, and itself: two independent engines must agree.

use hpgo::Control;
use hpgo::schedule::{Action, Kind, Request, Schedule, Synchronization, build};
use hpgo::simulate::communication::with_communication;
use hpgo::simulate::{
    Cause, Communication, Costs, Idle, Inputs, Links, Measures, StageBytes, StageTimes, Sweep, Times, Transfer, events,
};
use proptest::prelude::*;

const ASYNCHRONOUS: [(Communication, Links); 2] =
    [(Communication::Latency, Links::Free), (Communication::Link, Links::Queued)];
const ALL: [Communication; 5] = [
    Communication::Latency,
    Communication::Link,
    Communication::Stream { deferred_receives: false },
    Communication::Stream { deferred_receives: true },
    Communication::Rendezvous,
];

fn schedule(name: &str, ranks: u32, micro_batches: u32) -> Schedule {
    build(name, &Request::new(ranks, micro_batches)).expect("within the family's limits")
}

fn simulate(schedule: &Schedule, costs: &Costs, communication: Communication, iterations: u32) -> hpgo::Result<Times> {
    hpgo::simulate::simulate(schedule, costs, communication, iterations, &Control::default())
}

fn measure(schedule: &Schedule, costs: &Costs, times: &Times) -> Measures {
    hpgo::simulate::measure(schedule, costs, times, &Control::default()).expect("nobody stops it")
}

fn idle(schedule: &Schedule, costs: &Costs, times: &Times) -> Vec<Idle> {
    hpgo::simulate::idle(schedule, costs, times, &Control::default()).expect("nobody stops it")
}

fn slack_s(schedule: &Schedule, costs: &Costs, times: &Times) -> Vec<f64> {
    hpgo::simulate::slack_s(schedule, costs, times, &Control::default()).expect("nobody stops it")
}

fn memory(schedule: &Schedule, times: &Times, stages: &[StageBytes]) -> Vec<(Vec<f64>, Vec<f64>)> {
    hpgo::simulate::memory(schedule, times, stages, &Control::default()).expect("nobody stops it")
}

/// Equal stages with F 1 and B 2, and a latency on every edge.
fn uniform(schedule: &Schedule, latency_s: f64) -> Costs {
    let stages = schedule.rank_of_stage.len();
    let edges = vec![Transfer { busy_s: 0.0, latency_s }; stages];
    Costs { activation: edges.clone(), gradient: edges, ..Costs::of_stages(vec![StageTimes::new(1.0, 2.0); stages]) }
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1.0)
}

/// A valid schedule, built by taking any action that could run next, again and again.
fn random_schedule() -> impl Strategy<Value = Schedule> {
    let shape = (1_u32..=4, 1_u32..=3, 1_u32..=5, 1_u32..=2);
    shape.prop_flat_map(|(ranks, virtual_stages_per_rank, micro_batches, chains)| {
        let stages_per_pipeline = ranks * virtual_stages_per_rank;
        let stages = (stages_per_pipeline * chains) as usize;
        let placement = proptest::collection::vec(0..ranks, stages);
        let choices = proptest::collection::vec(any::<u32>(), stages * micro_batches as usize * 6 + 8);
        (placement, choices).prop_map(move |(rank_of_stage, choices)| {
            grow(ranks, stages_per_pipeline, chains, micro_batches, rank_of_stage, &choices)
        })
    })
}

fn grow(
    ranks: u32,
    stages_per_pipeline: u32,
    chains: u32,
    micro_batches: u32,
    rank_of_stage: Vec<u32>,
    choices: &[u32],
) -> Schedule {
    let mut schedule = Schedule {
        name: "random".into(),
        stages_per_pipeline,
        micro_batches: (0..chains).map(|chain| chain * micro_batches..(chain + 1) * micro_batches).collect(),
        rank_of_stage,
        action_lists: vec![Vec::new(); ranks as usize],
        synchronization: Synchronization::Flush,
        weight_versions: vec![1; ranks as usize],
    };
    let mut choices = choices.iter().copied().cycle();
    let mut choose = move |below: usize| choices.next().expect("endless") as usize % below;
    let mut ready: Vec<Action> = (0..chains)
        .flat_map(|chain| {
            (chain * micro_batches..(chain + 1) * micro_batches)
                .map(move |id| Action::forward(chain * stages_per_pipeline, id))
        })
        .collect();
    while !ready.is_empty() {
        let action = ready.swap_remove(choose(ready.len()));
        let rank = schedule.rank_of_stage[action.stage as usize];
        // Now and then a forward takes a whole backward of its rank along.
        let partner = ready.iter().position(|other| {
            action.kind == Kind::Forward
                && other.kind == Kind::Backward
                && schedule.rank_of_stage[other.stage as usize] == rank
        });
        let run = match partner {
            Some(place) if choose(2) == 0 => {
                let backward = ready.swap_remove(place);
                Action::overlapped((action.stage, action.micro_batch), (backward.stage, backward.micro_batch))
            }
            _ => action,
        };
        schedule.action_lists[rank as usize].push(run);
        for half in run.halves() {
            let back = |stage, split: bool| {
                if split {
                    Action::input_gradient(stage, half.micro_batch)
                } else {
                    Action::backward(stage, half.micro_batch)
                }
            };
            match half.kind {
                Kind::Forward if (half.stage + 1).is_multiple_of(stages_per_pipeline) => {
                    ready.push(back(half.stage, choose(2) == 0));
                }
                Kind::Forward => ready.push(Action::forward(half.stage + 1, half.micro_batch)),
                Kind::Backward | Kind::InputGradient => {
                    if half.kind == Kind::InputGradient {
                        ready.push(Action::weight_gradient(half.stage, half.micro_batch));
                    }
                    if !half.stage.is_multiple_of(stages_per_pipeline) {
                        ready.push(back(half.stage - 1, choose(2) == 0));
                    }
                }
                Kind::WeightGradient | Kind::Overlapped => {}
            }
        }
    }
    schedule
}

fn random_costs(schedule: &Schedule) -> impl Strategy<Value = Costs> + use<> {
    let stages = schedule.rank_of_stage.len();
    let rows = stages * schedule.total_micro_batches() as usize;
    let time = || 0.0..4.0_f64;
    let row = (time(), time(), time(), time(), proptest::option::of(time())).prop_map(
        |(forward_s, backward_s, input_gradient_s, weight_gradient_s, overlapped_s)| StageTimes {
            forward_s,
            backward_s,
            input_gradient_s,
            weight_gradient_s,
            overlapped_s,
        },
    );
    let edge = || (time(), time()).prop_map(|(busy_s, latency_s)| Transfer { busy_s, latency_s });
    (
        prop_oneof![
            proptest::collection::vec(row.clone(), stages..=stages),
            proptest::collection::vec(row, rows..=rows)
        ],
        proptest::collection::vec(edge(), stages),
        proptest::collection::vec(edge(), stages),
        proptest::collection::vec(time(), stages),
        proptest::collection::vec(time(), stages),
    )
        .prop_map(|(compute, activation, gradient, gradient_sync_s, optimizer_s)| Costs {
            compute,
            activation,
            gradient,
            gradient_sync_s,
            optimizer_s,
        })
}

fn random_case() -> impl Strategy<Value = (Schedule, Costs)> {
    random_schedule().prop_flat_map(|schedule| {
        let costs = random_costs(&schedule);
        (Just(schedule), costs)
    })
}

fn assert_same(left: &Times, right: &Times) {
    assert_eq!(left.offsets, right.offsets);
    for (a, b) in [
        (&left.start_s, &right.start_s),
        (&left.end_s, &right.end_s),
        (&left.arrival_s, &right.arrival_s),
        (&left.last_backward_s, &right.last_backward_s),
    ] {
        assert_eq!(a.len(), b.len());
        // Inputs that no action needs (ids of another chain) are infinite in both.
        assert!(a.iter().zip(b).all(|(&a, &b)| a.to_bits() == b.to_bits() || close(a, b)), "{a:?}\n{b:?}");
    }
    assert!(close(left.step_s, right.step_s), "{} {}", left.step_s, right.step_s);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_sweep_and_the_event_simulation_agree((schedule, costs) in random_case()) {
        for (communication, links) in ASYNCHRONOUS {
            let swept = Sweep::default().times(&schedule, &costs, links).expect("valid");
            assert_same(&swept, &events::times(&schedule, &costs, communication, 1, &Control::default()).expect("valid"));
            let step_s = Sweep::default().step_s(&schedule, &costs, links).expect("valid");
            prop_assert_eq!(step_s.to_bits(), swept.step_s.to_bits());
        }
    }

    #[test]
    fn no_step_is_shorter_than_its_busiest_rank_or_its_longest_chain((schedule, costs) in random_case()) {
        for communication in ALL {
            // Meeting communication may deadlock on a random order; then there is nothing to compare.
            let Ok(times) = simulate(&schedule, &costs, communication, 1) else { continue };
            for order in &schedule.action_lists {
                let busy_s: f64 = order.iter().map(|&action| costs.duration_s(action)).sum();
                prop_assert!(times.step_s >= busy_s - 1e-9);
            }
            prop_assert!(times.step_s >= max_chain_s(&schedule, &costs) - 1e-9);
        }
    }

    #[test]
    fn more_cost_never_makes_a_step_shorter((schedule, costs) in random_case(), pick in any::<usize>(), by in 0.0..3.0_f64) {
        let stages = schedule.rank_of_stage.len();
        let (row, stage) = (pick % costs.compute.len(), pick % stages);
        let raised = |change: &dyn Fn(&mut Costs)| {
            let mut dearer = costs.clone();
            change(&mut dearer);
            dearer
        };
        let dearer = [
            raised(&|costs| costs.compute[row].forward_s += by),
            raised(&|costs| costs.compute[row].backward_s += by),
            raised(&|costs| costs.compute[row].input_gradient_s += by),
            raised(&|costs| costs.compute[row].weight_gradient_s += by),
            raised(&|costs| costs.compute[row].overlapped_s = costs.compute[row].overlapped_s.map(|time_s| time_s + by)),
            raised(&|costs| costs.activation[stage].busy_s += by),
            raised(&|costs| costs.activation[stage].latency_s += by),
            raised(&|costs| costs.gradient[stage].busy_s += by),
            raised(&|costs| costs.gradient[stage].latency_s += by),
            raised(&|costs| costs.gradient_sync_s[stage] += by),
            raised(&|costs| costs.optimizer_s[stage] += by),
        ];
        for communication in ALL {
            let Ok(before) = simulate(&schedule, &costs, communication, 2) else { continue };
            for costs in &dearer {
                let after = simulate(&schedule, costs, communication, 2).expect("as before");
                prop_assert!(after.step_s >= before.step_s - 1e-9);
            }
        }
    }

    #[test]
    fn a_queue_is_never_faster_than_free_links((schedule, costs) in random_case()) {
        let free = simulate(&schedule, &costs, Communication::Latency, 1).expect("valid");
        let queued = simulate(&schedule, &costs, Communication::Link, 1).expect("valid");
        prop_assert!(queued.step_s >= free.step_s - 1e-9);
        for communication in [Communication::Stream { deferred_receives: false }, Communication::Rendezvous] {
            if let Ok(meeting) = simulate(&schedule, &costs, communication, 1) {
                prop_assert!(meeting.step_s >= free.step_s - 1e-9);
            }
        }
    }

    #[test]
    fn without_latency_asynchronous_modes_agree((schedule, costs) in random_case()) {
        let none = vec![Transfer::default(); schedule.rank_of_stage.len()];
        let costs = Costs { activation: none.clone(), gradient: none, ..costs };
        let free = simulate(&schedule, &costs, Communication::Latency, 1).expect("valid");
        assert_same(&free, &simulate(&schedule, &costs, Communication::Link, 1).expect("valid"));
    }

    #[test]
    fn only_blocking_messages_can_deadlock_a_valid_order((schedule, costs) in random_case()) {
        for communication in &ALL[..4] {
            prop_assert!(simulate(&schedule, &costs, *communication, 2).is_ok());
        }
    }

    #[test]
    fn every_message_has_a_send_and_a_receive((schedule, _) in random_case()) {
        for deferred in [false, true] {
            let lists = with_communication(&schedule, deferred).expect("valid");
            let texts: Vec<Vec<String>> =
                lists.iter().map(|list| list.iter().map(ToString::to_string).collect()).collect();
            let count = |verb: &str| texts.iter().flatten().filter(|text| text.contains(verb)).count();
            prop_assert_eq!(count("SEND"), count("RECV"));
            let computes = texts.iter().flatten().filter(|text| !text.contains("SEND") && !text.contains("RECV"));
            prop_assert_eq!(computes.count(), schedule.action_count());
        }
    }
}

/// The longest way through the data of one micro-batch, transfers included.
fn max_chain_s(schedule: &Schedule, costs: &Costs) -> f64 {
    let inputs = Inputs::of(schedule);
    let mut max_s: f64 = 0.0;
    for (chain, ids) in schedule.micro_batches.iter().enumerate() {
        for id in ids.clone() {
            let mut ready_s = vec![0.0_f64; inputs.count()];
            let stage = u32::try_from(chain).expect("two chains") * schedule.stages_per_pipeline;
            let mut next = inputs.of_action(Action::forward(stage, id)).next();
            while let Some(input) = next {
                let (is_gradient, stage, _) = inputs.describe(input);
                let found = schedule
                    .action_lists
                    .iter()
                    .flatten()
                    .find(|action| inputs.of_action(**action).any(|i| i == input));
                let action = *found.expect("the schedule is complete");
                let end_s = ready_s[input] + costs.duration_s(action);
                max_s = max_s.max(end_s);
                let half = action
                    .halves()
                    .find(|half| inputs.of_action(*half).any(|i| i == input))
                    .expect("one half takes it");
                next = inputs.made_ready_by(half);
                if let Some(next) = next {
                    let (next_is_gradient, next_stage, _) = inputs.describe(next);
                    let edge = match (is_gradient, next_is_gradient) {
                        (false, false) => costs.activation[stage],
                        (true, true) => costs.gradient[next_stage],
                        _ => Transfer::default(),
                    };
                    let is_local = schedule.rank_of_stage[stage] == schedule.rank_of_stage[next_stage];
                    let edge = if is_local { Transfer::default() } else { edge };
                    ready_s[next] = end_s + edge.busy_s + edge.latency_s;
                }
            }
        }
    }
    max_s
}

#[test]
fn one_f_one_b_and_gpipe_take_their_closed_form() {
    for name in ["1f1b", "eager_1f1b", "gpipe"] {
        for (ranks, micro_batches) in [(1, 1), (4, 8), (8, 3), (8, 64)] {
            let schedule = schedule(name, ranks, micro_batches);
            let times = simulate(&schedule, &uniform(&schedule, 0.0), Communication::Link, 1).expect("valid");
            assert!(close(times.step_s, f64::from(micro_batches + ranks - 1) * 3.0), "{name} {ranks} {micro_batches}");
        }
    }
}

#[test]
fn forward_only_takes_the_sum_of_stages_and_the_slowest_again_for_each_further_micro_batch() {
    let schedule = schedule("forward_only", 4, 7);
    let compute = [1.0, 3.0, 2.0, 0.5].map(|forward_s| StageTimes::new(forward_s, 0.0)).to_vec();
    let times = simulate(&schedule, &Costs::of_stages(compute), Communication::Link, 1).expect("valid");
    assert!(close(times.step_s, 6.5 + 6.0 * 3.0));
}

#[test]
fn latency_stalls_1f1b_by_its_formula_and_eager_1f1b_hides_it() {
    for stages in [2_u32, 4, 8] {
        for micro_batches in [8_u32, 16, 64] {
            for latency_s in [0.01, 0.05, 0.1, 0.2] {
                let (s, m) = (f64::from(stages), f64::from(micro_batches));
                let lockstep_s = (m + s - 1.0) * 3.0 + 2.0 * (s - 1.0) * latency_s;
                let stalled_s = lockstep_s + 2.0 * (s - 1.0) * latency_s * (m - 1.0) / s;
                let step_s = |name: &str| {
                    let schedule = schedule(name, stages, micro_batches);
                    let costs = uniform(&schedule, latency_s);
                    simulate(&schedule, &costs, Communication::Latency, 1).expect("valid").step_s
                };
                let measured_s = step_s("1f1b");
                assert!(
                    (measured_s - stalled_s).abs() <= latency_s * (1.0 + 1e-9),
                    "{stages} {micro_batches} {latency_s}: {measured_s} {stalled_s}"
                );
                for name in ["eager_1f1b", "gpipe"] {
                    assert!(
                        close(step_s(name), lockstep_s),
                        "{name} {stages} {micro_batches} {latency_s}: {} {lockstep_s}",
                        step_s(name)
                    );
                }
            }
        }
    }
}

#[test]
fn a_receive_posted_early_stalls_the_stream_and_deferral_removes_the_stall() {
    // Three ranks with two virtual stages each. PyTorch posts rank 0's receive for stage 3 as soon as rank 2 has computed, in
    // front of rank 0's next send to rank 1, which then waits for a message that it has nothing to do with.
    let order = |first: u32| {
        [first, first + 3].iter().flat_map(|&stage| (0..3).map(move |id| Action::forward(stage, id))).collect()
    };
    let schedule = Schedule::of_one_chain("loop", 3, vec![0, 1, 2, 0, 1, 2], (0..3).map(order).collect());
    let costs = Costs::of_stages(vec![StageTimes::new(1.0, 0.0); 6]);
    let step_s = |communication| simulate(&schedule, &costs, communication, 1).expect("valid").step_s;
    assert!(close(step_s(Communication::Latency), 8.0));
    // Rank 0's last receive ends at 7; only then its first output of stage 3 leaves for the last four seconds of work.
    assert!(close(step_s(Communication::Stream { deferred_receives: false }), 11.0));
    assert!(close(step_s(Communication::Stream { deferred_receives: true }), 8.0));
}

#[test]
fn blocking_communication_costs_a_little_more_than_asynchronous() {
    for name in ["gpipe", "1f1b"] {
        let schedule = schedule(name, 4, 16);
        let costs = uniform(&schedule, 0.1);
        let step_s = |communication| simulate(&schedule, &costs, communication, 1).expect("valid").step_s;
        let (free_s, blocking_s) = (step_s(Communication::Latency), step_s(Communication::Rendezvous));
        assert!(blocking_s > free_s && blocking_s < free_s * 1.2, "{name}: {free_s} {blocking_s}");
    }
}

#[test]
fn a_deadlock_of_blocking_messages_names_who_waits_for_whom() {
    // Rank 0 sends four times before it receives, rank 1 sends behind its first receive.
    let on = |stage: u32| (0..4).map(move |id| Action::forward(stage, id));
    let action_lists = vec![on(0).chain(on(2)).collect(), on(1).collect()];
    let schedule = Schedule::of_one_chain("crossed", 4, vec![0, 1, 0], action_lists);
    let costs = Costs::of_stages(vec![StageTimes::new(1.0, 0.0); 3]);
    let error = simulate(&schedule, &costs, Communication::Rendezvous, 1).expect_err("nobody receives");
    let text = error.to_string();
    assert!(text.contains("rank 0 waits at 0SEND_F2 for rank 1"), "{text}");
    assert!(text.contains("rank 1 waits at 1SEND_F0 for rank 0"), "{text}");
}

#[test]
fn an_order_that_waits_for_itself_is_an_error_in_every_mode() {
    let mut schedule = schedule("1f1b", 3, 4);
    schedule.action_lists[1].swap(0, 2);
    schedule.action_lists[1].swap(1, 3);
    for communication in ALL {
        for iterations in [1, 2] {
            let error = simulate(&schedule, &uniform(&schedule, 0.1), communication, iterations);
            assert!(matches!(error, Err(hpgo::Error::Schedule { .. })), "{communication:?}: {error:?}");
        }
    }
}

#[test]
fn iterations_follow_each_other_behind_synchronisation_and_optimizer() {
    let schedule = schedule("1f1b", 4, 8);
    let mut costs = uniform(&schedule, 0.0);
    costs.gradient_sync_s = vec![0.5; 4];
    costs.optimizer_s = vec![0.25; 4];
    let one = simulate(&schedule, &costs, Communication::Link, 1).expect("valid").step_s;
    assert!(close(one, 33.75));
    // Rank 0 ends last and starts first: nothing of the next step overlaps.
    for iterations in [2, 5] {
        let all = simulate(&schedule, &costs, Communication::Link, iterations).expect("valid");
        assert!(close(all.step_s, 33.75 * f64::from(iterations)));
        assert_eq!(all.start_s.len(), schedule.action_count() * iterations as usize);
        assert_eq!(all.last_backward_s.len(), 4 * iterations as usize);
    }
}

proptest! {
    #[test]
    fn lock_step_takes_the_slowest_active_stage_of_every_step(
        stages in 1_u32..6,
        micro_batches in 1_u32..8,
        times_s in proptest::collection::vec(0.1..5.0_f64, 6),
        latency_s in 0.0..3.0_f64,
        communication in proptest::sample::select(&ALL[..]),
    ) {
        let schedule = schedule("staggered", stages, micro_batches);
        let mut costs = uniform(&schedule, latency_s);
        costs.compute = times_s[..stages as usize].iter().map(|&time_s| StageTimes::new(time_s, 0.0)).collect();
        let times = simulate(&schedule, &costs, communication, 1).expect("valid");
        let mut begin_s = 0.0;
        for step in 0..stages + micro_batches - 1 {
            // In step t, stage s works on micro-batch t - s; all but the last stage pass their output on.
            let mut max_s = 0.0_f64;
            for stage in (0..stages).filter(|&stage| stage <= step && step - stage < micro_batches) {
                let place = times.offsets[stage as usize] + (step - stage) as usize;
                prop_assert!(close(times.start_s[place], begin_s));
                let transfer_s = if stage + 1 < stages { latency_s } else { 0.0 };
                max_s = max_s.max(times_s[stage as usize] + transfer_s);
            }
            begin_s += max_s;
        }
        prop_assert!(close(times.step_s, begin_s), "{} against {begin_s}", times.step_s);
        let twice = simulate(&schedule, &costs, communication, 2).expect("valid");
        prop_assert!(close(twice.step_s, 2.0 * begin_s));
        let slack_s = slack_s(&schedule, &costs, &times);
        let on_path = (0..slack_s.len()).filter(|&place| slack_s[place] < 1e-9);
        let steps: std::collections::BTreeSet<u64> = on_path.map(|place| times.start_s[place].to_bits()).collect();
        prop_assert_eq!(steps.len(), (stages + micro_batches - 1) as usize, "each step has an action that sets its length");
    }
}

#[test]
fn lock_step_waits_for_the_slowest_where_forwards_alone_run_ahead() {
    let times = [3.0, 1.0, 3.0].map(|time_s| StageTimes::new(time_s, 0.0)).to_vec();
    let step_s = |name| {
        let schedule = schedule(name, 3, 4);
        let costs = Costs::of_stages(times.clone());
        let times = simulate(&schedule, &costs, Communication::Link, 1).expect("valid");
        (times.step_s, measure(&schedule, &costs, &times).idle_by_cause_s)
    };
    // Six steps of 3 seconds; stage 1 waits two of them in each, its last one aside.
    assert_eq!(step_s("staggered"), (18.0, [3.0 + 6.0, 6.0 + 5.0, 0.0, 0.0, 3.0 * 2.0]));
    assert!(close(step_s("forward_only").0, 16.0));
}

#[test]
fn asynchronous_iterations_add_no_idle_time() {
    for name in ["pipedream", "pipedream_2bw", "pipemare"] {
        let one = schedule(name, 4, 8);
        let idle_s = |schedule: &Schedule| {
            let costs = uniform(schedule, 0.0);
            let times = simulate(schedule, &costs, Communication::Link, 1).expect("valid");
            (times.step_s, idle(schedule, &costs, &times).iter().map(|stretch| stretch.end_s - stretch.start_s).sum())
        };
        let (one_s, one_idle_s): (f64, f64) = idle_s(&one);
        for iterations in [2, 5] {
            let several = one.without_flush(iterations).expect("few actions");
            several.validate().expect("still valid");
            assert_eq!(several.peak_in_flight(), one.peak_in_flight());
            let (several_s, several_idle_s) = idle_s(&several);
            assert!(close(several_s, one_s + 24.0 * f64::from(iterations - 1)), "{name}: {several_s}");
            assert!(close(several_idle_s, one_idle_s), "{name}: {several_idle_s} against {one_idle_s}");
        }
    }
    let flushed = schedule("1f1b", 4, 8);
    assert_eq!(flushed.without_flush(3), Ok(flushed.clone()));
    assert!(flushed.without_flush(0).is_err() && flushed.without_flush(u32::MAX).is_err());
}

#[test]
fn costs_that_make_no_sense_are_errors_that_name_the_stage() {
    let schedule = schedule("1f1b", 3, 4);
    let good = uniform(&schedule, 0.1);
    for bad in [f64::NAN, -1.0, f64::INFINITY] {
        let mut costs = good.clone();
        costs.compute[2].backward_s = bad;
        let error = simulate(&schedule, &costs, Communication::Link, 1).expect_err("a bad time").to_string();
        assert!(error.contains("backward time of stage 2"), "{error}");
    }
    for costs in [
        Costs { compute: vec![StageTimes::new(1.0, 2.0); 4], ..good.clone() },
        Costs { gradient: Vec::new(), ..good.clone() },
        Costs { optimizer_s: vec![0.0; 2], ..good },
    ] {
        assert!(matches!(simulate(&schedule, &costs, Communication::Link, 1), Err(hpgo::Error::Argument { .. })));
    }
}

/// Every action of a case gets its own row of costs, so that one of them can be delayed alone.
fn delayed(schedule: &Schedule, costs: &Costs, action: Action, by_s: f64) -> Costs {
    let stages = schedule.rank_of_stage.len();
    let mut costs = costs.clone();
    if costs.compute.len() == stages {
        costs.compute = costs.compute.repeat(schedule.total_micro_batches() as usize);
    }
    let duration_s = costs.duration_s(action);
    let row = &mut costs.compute[action.micro_batch as usize * stages + action.stage as usize];
    match action.kind {
        Kind::Forward => row.forward_s += by_s,
        Kind::Backward => row.backward_s += by_s,
        Kind::InputGradient => row.input_gradient_s += by_s,
        Kind::WeightGradient => row.weight_gradient_s += by_s,
        Kind::Overlapped => row.overlapped_s = Some(duration_s + by_s),
    }
    costs
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn an_action_may_be_late_by_its_slack_and_no_more((schedule, costs) in random_case(), pick in any::<usize>()) {
        let before = simulate(&schedule, &costs, Communication::Latency, 1).expect("valid");
        let slack_s = slack_s(&schedule, &costs, &before);
        prop_assert!(slack_s.iter().any(|&slack_s| slack_s < 1e-9), "there is a critical path");
        let actions: Vec<Action> = schedule.action_lists.iter().flatten().copied().collect();
        let place = pick % actions.len();
        for (extra_s, longer_s) in [(0.0, 0.0), (1.0, 1.0)] {
            let costs = delayed(&schedule, &costs, actions[place], slack_s[place] + extra_s);
            let after = simulate(&schedule, &costs, Communication::Latency, 1).expect("valid");
            prop_assert!(close(after.step_s, before.step_s + longer_s), "{} {}", after.step_s, before.step_s);
        }
    }

    #[test]
    fn work_and_idle_stretches_fill_the_makespan((schedule, costs) in random_case()) {
        for communication in ALL {
            let Ok(times) = simulate(&schedule, &costs, communication, 2) else { continue };
            let measures = measure(&schedule, &costs, &times);
            let total_s = times.step_s * schedule.action_lists.len() as f64;
            let busy_s: f64 = measures.busy_s.iter().sum();
            prop_assert!(close(busy_s + measures.idle_by_cause_s.iter().sum::<f64>(), total_s));
            prop_assert!(close(measures.idle_over_total * total_s, total_s - busy_s));
            prop_assert!(measures.max_rank_span_s <= times.step_s + 1e-9);
            let stretches = idle(&schedule, &costs, &times);
            prop_assert!(stretches.iter().all(|stretch| stretch.start_s < stretch.end_s));
        }
    }

    #[test]
    fn memory_returns_to_what_is_kept_and_peaks_with_the_activations((schedule, costs) in random_case()) {
        let times = simulate(&schedule, &costs, Communication::Link, 2).expect("valid");
        let count = |stash: f64| {
            let one = StageBytes { weights: 100.0, activation: 1.0, weight_gradient_stash: stash, ..StageBytes::default() };
            memory(&schedule, &times, &vec![one; schedule.rank_of_stage.len()])
        };
        let measures = measure(&schedule, &costs, &times);
        for (stash, peaks) in [(1.0, &measures.peak_in_flight), (0.0, &measures.peak_in_flight_freed_at_input_gradient)] {
            for (rank, (time_s, bytes)) in count(stash).into_iter().enumerate() {
                let stages = schedule.rank_of_stage.iter().filter(|&&at| at as usize == rank).count();
                let kept = 100.0 * stages as f64;
                prop_assert!(time_s.is_sorted());
                prop_assert!(close(bytes[0], kept) && close(bytes[bytes.len() - 1], kept));
                let peak = bytes.iter().copied().fold(0.0, f64::max);
                prop_assert!(close(peak, kept + f64::from(peaks[rank])), "{} {:?}", peak, peaks);
            }
        }
    }

    #[test]
    fn recomputation_never_holds_more_than_what_it_makes_again((schedule, costs) in random_case(), kept in 0.0..1.0) {
        let times = simulate(&schedule, &costs, Communication::Link, 2).expect("valid");
        let peaks = |activation: f64, recomputed: f64| -> Vec<f64> {
            let stash = activation + recomputed;
            let one = StageBytes { activation, recomputed, weight_gradient_stash: stash, ..StageBytes::default() };
            let curves = memory(&schedule, &times, &vec![one; schedule.rank_of_stage.len()]);
            curves.into_iter().map(|(_, bytes)| bytes.into_iter().fold(0.0, f64::max)).collect()
        };
        let (all, inputs, again) = (peaks(1.0, 0.0), peaks(kept, 0.0), peaks(kept, 1.0 - kept));
        for rank in 0..all.len() {
            prop_assert!(again[rank] <= all[rank] + 1e-9, "{} > {}", again[rank], all[rank]);
            let one = all[rank].min(1.0); // 0 for a rank that does nothing
            prop_assert!(again[rank] + 1e-9 >= inputs[rank].max(one), "{} < {}", again[rank], inputs[rank]);
        }
    }
}

#[test]
fn the_measures_of_the_textbook_case_are_the_published_ones() {
    let schedule = schedule("1f1b", 4, 8);
    let costs = uniform(&schedule, 0.0);
    let times = simulate(&schedule, &costs, Communication::Link, 1).expect("valid");
    let measures = measure(&schedule, &costs, &times);
    assert!(close(measures.makespan_s, 33.0));
    assert!(close(measures.max_rank_span_s, 33.0));
    assert!(close(measures.idle_over_total, 36.0 / 132.0)); // 27.3 %
    assert!(close(measures.idle_over_busy, 0.375));
    assert!(close(measures.idle_over_busiest, 9.0 / 33.0));
    assert_eq!(measures.peak_in_flight, [4, 3, 2, 1]);
    assert_eq!(measures.messages, 2 * 3 * 8);
    // Ranks 1 to 3 start 1, 2, 3 late and end 2, 4, 6 early; the rest is waiting for gradients.
    let [fill_s, drain_s, dependency_s, communication_s, imbalance_s] = measures.idle_by_cause_s;
    assert!(close(fill_s, 6.0) && close(drain_s, 12.0) && close(dependency_s, 18.0));
    assert!(close(communication_s, 0.0) && close(imbalance_s, 0.0));
}

#[test]
fn waiting_for_a_slower_rank_is_imbalance_and_for_a_message_is_communication() {
    let schedule = schedule("1f1b", 2, 8);
    let slow_last = Costs::of_stages(vec![StageTimes::new(1.0, 2.0), StageTimes::new(2.0, 4.0)]);
    let times = simulate(&schedule, &slow_last, Communication::Link, 1).expect("valid");
    let measures = measure(&schedule, &slow_last, &times);
    // All waits of rank 0 but the first second, in which rank 1 hasn't begun yet: F 2 and B 4 there, F 1 and B 2 here.
    assert!(close(measures.idle_by_cause_s[Cause::Imbalance as usize], 26.0));
    let late = uniform(&schedule, 0.5);
    let times = simulate(&schedule, &late, Communication::Latency, 1).expect("valid");
    let measures = measure(&schedule, &late, &times);
    assert!(close(measures.idle_by_cause_s[Cause::Communication as usize], 4.0));
}

#[test]
fn what_is_computed_of_a_run_ends_when_it_is_cancelled() {
    let schedule = schedule("1f1b", 4, 8);
    let costs = uniform(&schedule, 0.0);
    let times = simulate(&schedule, &costs, Communication::Link, 1).expect("valid");
    let control = Control::default();
    control.cancel();
    let bytes = vec![StageBytes { activation: 1.0, ..StageBytes::default() }; 4];
    for ended in [
        hpgo::simulate::measure(&schedule, &costs, &times, &control).map(drop),
        hpgo::simulate::idle(&schedule, &costs, &times, &control).map(drop),
        hpgo::simulate::slack_s(&schedule, &costs, &times, &control).map(drop),
        hpgo::simulate::memory(&schedule, &times, &bytes, &control).map(drop),
    ] {
        assert_eq!(ended, Err(hpgo::Error::Cancelled));
    }
}
