-- Called after the contract tables are loaded: folds the transitions of the hot path into arrays by source state.
create or replace function _fold_contract() returns void language sql set search_path from current as $$
  update lifecycle l set
    claim_to = (select array_agg(x.target order by g) from generate_series(1, 15) g
                  left join transition x on x.lifecycle = l.lifecycle and x.source = g and x.trigger = 'claim'),
    claim_event = (select array_agg(x.event order by g) from generate_series(1, 15) g
                  left join transition x on x.lifecycle = l.lifecycle and x.source = g and x.trigger = 'claim'),
    claim_roles = (select bit_or(x.roles) from transition x where x.lifecycle = l.lifecycle and x.trigger = 'claim'),
    start_to = (select array_agg(x.target order by g) from generate_series(1, 15) g
                  left join transition x on x.lifecycle = l.lifecycle and x.source = g and x.trigger = 'start'),
    start_event = (select array_agg(x.event order by g) from generate_series(1, 15) g
                  left join transition x on x.lifecycle = l.lifecycle and x.source = g and x.trigger = 'start'),
    start_roles = (select array_agg(x.roles order by g) from generate_series(1, 15) g
                  left join transition x on x.lifecycle = l.lifecycle and x.source = g and x.trigger = 'start'),
    -- a step that finalizes an artifact names it and goes one by one
    done_to = (select array_agg(x.target order by g) from generate_series(1, 15) g
                  left join transition x on x.lifecycle = l.lifecycle and x.source = g and x.trigger = 'complete' and not x.finalizes),
    done_event = (select array_agg(x.event order by g) from generate_series(1, 15) g
                  left join transition x on x.lifecycle = l.lifecycle and x.source = g and x.trigger = 'complete' and not x.finalizes),
    initial = (select x.target from transition x where x.lifecycle = l.lifecycle and x.source = 0),
    initial_event = (select x.event from transition x where x.lifecycle = l.lifecycle and x.source = 0),
    initial_claimable = (select s.claimable from transition x join state s on s.lifecycle = x.lifecycle and s.state = x.target
                          where x.lifecycle = l.lifecycle and x.source = 0),
    initial_timer_s = (select s.timer_s from transition x join state s on s.lifecycle = x.lifecycle and s.state = x.target
                        where x.lifecycle = l.lifecycle and x.source = 0)
$$;
