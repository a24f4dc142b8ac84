-- What is locked where only one may work at a time. Advisory locks would do the same, but whoever can log in can take one of any number
-- and hold it; these rows can be locked by the ledger's functions alone, because nobody else may write to this table.
create table work_lock (kind text collate "C" primary key);
insert into work_lock (kind) values ('alone'), ('partitions'), ('restore'), ('retain');
